"""Every head runs in every forward pass in one order; heads without labels change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from palm_ds.common.errors import UserError
from palm_ds.data.tasks.example import Example, collate
from palm_ds.model.config.config import EncoderConfig
from palm_ds.model.encoder.encoder import build_encoder
from palm_ds.model.encoder.transformer import TransformerEncoder
from palm_ds.model.heads.heads import ClassHead, MaskedLMHead
from palm_ds.model.heads.pooled import RegressionHead
from palm_ds.model.inputs.batch import Batch
from palm_ds.model.kernels import Kernels
from palm_ds.model.multi_task_model import Model, TaskOutput
from tests.helpers.fake_gpu import fake_gpu, parameters_to_fake_gpu, to_fake_gpu
from tests.helpers.own_encoder import PreNorm

FAST = Kernels(attention="tiles", masked_lm_loss="chunked", dropout="counter")
CONFIG = EncoderConfig(
    vocab_size=50,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    max_positions=16,
    dropout=0.0,
    attention_dropout=0.0,
)


def model(kernels: Kernels = FAST, **changes: object) -> Model:
    torch.manual_seed(4)
    backbone = build_encoder(CONFIG, kernels)
    heads = {
        "words": MaskedLMHead(backbone),
        "order": ClassHead(16, 6, pooled=True),
        "case": ClassHead(16, 2),
    }
    return Model(backbone, heads, {"a": "words", "b": "order", "c": "case", "d": "words"})


def text(size: int, **labels: tuple[list[int], list[int]]) -> Example:
    return Example(
        input_ids=np.arange(size) + 5,
        token_type_ids=np.zeros(size, np.int64),
        source_offsets=np.arange(size),
        annotations={},
        labels={task: (np.array(at), np.array(y)) for task, (at, y) in labels.items()},
    )


def batch(**labels: tuple[list[int], list[int]]) -> Batch:
    return collate([[(text(5), 0), (text(9, **labels), 1)], [(text(12), 2)]], length=16, pad=0)


def test_outputs_are_in_the_order_of_tasks_for_any_labels() -> None:
    net = model()
    for labels in ({}, {"d": ([1], [7])}, {"c": ([2, 3], [0, 1]), "a": ([4], [9])}):
        outputs = net(batch(**labels))
        assert list(outputs) == ["a", "b", "c", "d"]
        for task, output in outputs.items():
            assert isinstance(output, TaskOutput)
            assert output.loss_sum.requires_grad and output.loss_sum.dtype == torch.float32
            assert (output.loss_sum.item() > 0) == (task in labels)


@pytest.mark.parametrize("kernels", [Kernels(), FAST])
def test_every_parameter_gets_a_gradient_and_idle_heads_get_zero(kernels: Kernels) -> None:
    net = model(kernels)
    outputs = net(batch(c=([0, 3], [1, 0])))
    sum(output.loss_sum for output in outputs.values()).backward()  # type: ignore[union-attr]
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(("heads.words", "heads.order", "backbone.pooler")):
            assert (parameter.grad == 0).all(), name
        elif name.startswith(("heads.case", "backbone.layers")) and "qkv.bias" not in name:
            assert (parameter.grad != 0).any(), name


def test_an_idle_head_cannot_make_the_loss_non_finite() -> None:
    """Its weights may be anything finite: the infinite scores they would give are never
    computed."""
    net = model()
    with torch.no_grad():
        net.heads["order"].out.weight.fill_(3e38)
    net(batch(c=([0], [1])))["b"].loss_sum.backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    assert grads and all((grad == 0).all() for grad in grads)


def test_an_unused_pooler_gets_a_gradient_too() -> None:
    torch.manual_seed(4)
    backbone = build_encoder(CONFIG)
    net = Model(backbone, {"case": ClassHead(16, 2)}, {"c": "case"})
    net(batch(c=([0], [1])))["c"].loss_sum.backward()
    grad = backbone.pooler.dense.weight.grad
    assert grad is not None and (grad == 0).all()


def test_only_labeled_rows_reach_a_head() -> None:
    net = model()
    seen: list[int] = []
    net.heads["words"].register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    net(batch(a=([1, 4, 6], [7, 8, 9])))
    assert seen == [3, 1]  # task a, and task d without labels on the same head


def test_losses_depend_on_labeled_rows_only() -> None:
    net = model().eval()
    made = batch(a=([1, 4], [7, 8]), b=([0], [5]))
    outputs, hidden = net(made), net.backbone(made)[0]
    words = net.heads["words"](hidden[[6, 9]], torch.tensor([7, 8]))  # the text begins at 5
    order = net.heads["order"](net.backbone.pooler(hidden[5:6]), torch.tensor([5]))
    torch.testing.assert_close(outputs["a"].loss_sum, words.loss_sum)
    torch.testing.assert_close(outputs["b"].loss_sum, order.loss_sum)


@pytest.mark.parametrize("kernels", [Kernels(), FAST])
def test_scores_equal_those_of_the_complete_model(kernels: Kernels) -> None:
    net = model(kernels).eval()
    made = batch(a=([4, 2], [9, 1]), b=([0], [3]), c=([2, 4, 8], [0, 1, 1]))
    with torch.no_grad():
        expected, found = net(made, ["a", "b", "c"]), net.scores(made, ["c", "b", "a", "d"])
    assert list(found) == ["c", "b", "a"]
    for task, scores in found.items():
        torch.testing.assert_close(scores, expected[task].scores, atol=1e-6, rtol=1e-5)
    assert net.scores(batch(), ["a"]) == {}


def test_logits_are_the_scores_in_the_loss() -> None:
    net = model().eval()
    made = batch(b=([0], [5]), a=([1, 4], [7, 8]))
    with torch.no_grad():
        outputs = net(made)
        for task in ("a", "b"):
            logits, targets = net.logits(made, task), made.labels[task][1]
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            torch.testing.assert_close(outputs[task].loss_sum, loss)
            assert outputs[task].correct == (logits.argmax(-1) == targets).sum()


def test_gradients_do_not_depend_on_the_kernels() -> None:
    made = batch(a=([1, 4, 8], [7, 8, 9]), b=([0], [5]), c=([1], [0]))
    grads = []
    for kernels in (Kernels(), FAST, Kernels(attention="sdpa")):
        net = model(kernels)
        sum(out.loss_sum for out in net(made).values()).backward()  # type: ignore[union-attr]
        grads.append({name: p.grad for name, p in net.named_parameters()})
    for other in grads[1:]:
        for name, grad in grads[0].items():
            torch.testing.assert_close(other[name], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_last_layer_is_computed_where_labels_are(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = batch(a=([1, 4, 8], [7, 8, 9]), b=([0], [5]), c=([1, 4], [0, 1]))
    rows, grads = [], []
    for few in (0.5, 0.0):
        monkeypatch.setattr("palm_ds.model.multi_task_model._MAX_SHARE", few)
        net = model()
        net.backbone.recompute = recompute
        for layer in net.backbone.layers:
            layer.expand.register_forward_hook(lambda _, x, y: rows.append(y[..., 0].numel()))
        sum(out.loss_sum for out in net(made).values()).backward()  # type: ignore[union-attr]
        grads.append({name: p.grad for name, p in net.named_parameters()})
    many = [32, 7] if not recompute else [32, 7, 7, 32]  # 6 labels, and one row for the idle task
    assert rows == many + [32] * len(many)
    for name, grad in grads[1].items():
        torch.testing.assert_close(grads[0][name], grad, atol=1e-6, rtol=1e-5)


def test_heads_and_tasks_must_fit_together() -> None:
    backbone = build_encoder(CONFIG)
    with pytest.raises(UserError, match='no head "ordr"; did you mean "order"'):
        Model(backbone, {"order": ClassHead(16, 2)}, {"a": "order", "b": "ordr"})
    with pytest.raises(UserError, match='head "case": no task'):
        Model(backbone, {"order": ClassHead(16, 2), "case": ClassHead(16, 2)}, {"a": "order"})
    with pytest.raises(UserError, match='no task "e"'):
        model().logits(batch(), "e")


def dropping(kernels: Kernels, kind: type[TransformerEncoder] = TransformerEncoder) -> Model:
    torch.manual_seed(4)
    config = replace(CONFIG, max_positions=48, dropout=0.2, attention_dropout=0.2)
    backbone = kind(config, replace(kernels, dropout="counter"))
    heads = {"words": MaskedLMHead(backbone), "order": ClassHead(16, 6, pooled=True, dropout=0.4)}
    return Model(backbone, heads, {"a": "words", "b": "order"})


def rows_of_texts() -> list[list[tuple[Example, int]]]:
    labels = {"a": ([1, 4], [7, 8]), "b": ([0], [5])}
    return [[(text(n, **labels), 0) for n in sizes] for sizes in ([9, 7, 22], [40], [6, 5], [13])]


def losses_and_grads(
    net: Model, parts: list[slice], lengths: list[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Added up over micro-batches of these rows and lengths."""
    total = torch.zeros(())
    for part, length in zip(parts, lengths, strict=True):
        micro = collate(rows_of_texts()[part], length=length, pad=0)
        micro = replace(micro, first_row=part.start, dropout_key=99)
        loss = torch.stack([out.loss_sum for out in net(micro).values()]).sum()
        loss.backward()
        total = total + loss.detach()
    return total, {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("attention", ["plain", "tiles"])
@pytest.mark.parametrize("kind", [TransformerEncoder, PreNorm])
def test_dropout_does_not_depend_on_micro_batches(
    kind: type[TransformerEncoder], attention: str, recompute: bool
) -> None:
    """Nor on padding, the kernel of attention, or recomputation."""
    found = losses_and_grads(dropping(Kernels(), kind), [slice(0, 4)], [48])
    net = dropping(Kernels(attention=attention), kind)
    net.backbone.recompute = recompute
    alone = [slice(row, row + 1) for row in range(4)]
    split = losses_and_grads(net, alone, [38, 41, 12, 13])
    torch.testing.assert_close(split, found, atol=1e-5, rtol=1e-5)
    net.zero_grad()
    joined = losses_and_grads(net, [slice(0, 2), slice(2, 4)], [43, 15])
    torch.testing.assert_close(joined, found, atol=1e-5, rtol=1e-5)


def test_each_step_has_its_own_dropout() -> None:
    net = dropping(FAST)
    made = replace(collate(rows_of_texts(), length=48, pad=0), dropout_key=1)
    first, again = net(made)["a"].loss_sum, net(made)["a"].loss_sum
    assert first == again != net(replace(made, dropout_key=2))["a"].loss_sum
    net.eval()
    assert net(made)["a"].loss_sum == net(replace(made, dropout_key=2))["a"].loss_sum


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_heads_of_means_in_half_precision(dtype: torch.dtype) -> None:
    """As of a classification with `pooling: mean`: means are fp32, and heads are not."""
    found = {}
    for precision in (torch.float32, dtype):
        torch.manual_seed(4)
        backbone = build_encoder(CONFIG, Kernels(attention="sdpa"))
        heads = {"a": ClassHead(16, 3, means=True), "b": RegressionHead(16, means=True)}
        net = Model(backbone, heads, {name: name for name in heads}).to(precision).eval()
        made = batch(a=([0], [2]))
        made.labels["b"] = made.labels["a"][0], torch.tensor([0.5])
        outputs, scores = net(made, ["a"]), net.scores(made, ["a", "b"])
        assert torch.equal(outputs["a"].scores, scores["a"])
        found[precision] = torch.stack([outputs[name].loss_sum for name in heads]), scores["a"]
    torch.testing.assert_close(
        found[dtype], found[torch.float32], atol=0.02, rtol=0.02, check_dtype=False
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("attention", "dropout"),
    [("sdpa", "plain"), ("varlen", "plain"), ("triton", "counter")],
)
@pytest.mark.parametrize("loss", ["chunked", "plain"])
def test_dtypes_on_a_gpu(dtype: torch.dtype, attention: str, dropout: str, loss: str) -> None:
    """Scores are in the precision of the weights, losses in fp32. No tensor holds numbers."""
    net = dropping(Kernels(attention=attention, masked_lm_loss=loss)).to(dtype)
    net.backbone.kernels = replace(net.backbone.kernels, dropout=dropout)
    made = batch(a=([1, 4], [7, 8]))
    with fake_gpu():
        parameters_to_fake_gpu(net)
        fake = Batch(**{name: to_fake_gpu(value) for name, value in vars(made).items()})
        outputs = net(replace(fake, dropout_key=1), ["a"])
        for output in outputs.values():
            assert (output.loss_sum.dtype, output.loss_sum.device.type) == (torch.float32, "cuda")
        scores = outputs["a"].scores
        assert scores is not None and (scores.dtype, scores.shape) == (dtype, (2, 50))
