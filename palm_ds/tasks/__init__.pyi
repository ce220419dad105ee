"""The fine-tuning tasks. Made by docs/generate.py from the dataclasses; do not edit."""

# pyright: reportIncompatibleMethodOverride=false
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from palm_ds.data.sources.row_inputs import Rows, Splits
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.tasks.classification import Classification as _Classification
from palm_ds.tasks.generation import Generation as _Generation
from palm_ds.tasks.masked_words import MaskedWords as _MaskedWords
from palm_ds.tasks.matching import Matching as _Matching
from palm_ds.tasks.multi_label import MultiLabel as _MultiLabel
from palm_ds.tasks.multiple_choice import MultipleChoice as _MultipleChoice
from palm_ds.tasks.ranking import Ranking as _Ranking
from palm_ds.tasks.reading import Reading as _Reading
from palm_ds.tasks.regression import Regression as _Regression
from palm_ds.tasks.retrieval import Retrieval as _Retrieval
from palm_ds.tasks.similarity import Similarity as _Similarity
from palm_ds.tasks.tagging import Tagging as _Tagging

class Classification(_Classification):
    """Predicts one of several classes."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        labels: Sequence[str] = (),
        dropout: float = 0.1,
        smoothing: float = 0.0,
        positive: str = "",
        class_weights: Mapping[str | int, float] | Literal["balanced"] = ...,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        labels: Class names in order; by default those in the training rows, numbers in
            numerical order, then others alphabetically.
        dropout: Dropout on the input of the head during training.
        smoothing: Label smoothing: share of the target probability spread over all classes.
        positive: Class for which F1 is reported; by default the second of two classes.
        class_weights: {class: weight of its loss during training}, by default 1; `balanced`:
            inverse class frequencies, so that all classes have the same total weight in the
            training rows.
        """

class Generation(_Generation):
    """Writes texts."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "target",
        max_length: int = 0,
        noise_rate: float = 0.5,
        noise: Literal["random", "token"] = "random",
        word_weight: float = 1.0,
        query: Literal["auto", "attn", "mask"] = "auto",
        target_segment: int = 3,
        positions: Literal["continuous", "restart"] = "continuous",
        smoothing: float = 0.1,
        max_source: int = 0,
        max_target: int = 64,
        longest_span: int = 3,
        max_turns: int = 0,
        generate: Mapping[str, Any] = ...,
        score: Literal["rouge", "rouge_stemmed", "bleu", "dialogue", "answers"] = "rouge",
        evaluate_rows: int = 256,
        evaluate_beams: int = 1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: The column of the targets.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        noise_rate: Share of the target tokens in the context that are replaced during training.
        noise: random: by a random token. token: by [NOISE], which the vocabulary must have.
        word_weight: Weight of the word-by-word flow in the loss, from 0 to 1; the span-by-span
            flow has the rest (the paper's lambda). A flow without weight has no queries.
        query: The token of the queries: [ATTN], or [MASK] where the vocabulary has none.
        target_segment: Segment of the target and its queries; the last of the encoder if that
            has fewer.
        positions: Position embeddings: one sequence over source and target, or from 0 again at
            the target and from 1 at each further source.
        smoothing: Label smoothing: share of the target probability spread over the vocabulary.
        max_source: Maximum tokens of the source, with [CLS] and [SEP]; 0: what the target
            leaves of a row.
        max_target: Maximum tokens of the target, with [CLS] and [SEP].
        longest_span: Tokens of the longest span of the span-by-span flow, whose spans are
            random; the paper has this flow in pretraining only.
        max_turns: Turns of a dialogue that are read, the last ones: column `turns`, after the
            sources, which may be missing. 0: no dialogue. The backbone needs max_turns + 2
            token types.
        generate: How predictions are written: `max_tokens`, `beams`, `length_penalty`,
            `no_repeat_ngram`, `temperature` ... (docs/generation.md); by default greedily.
        score: rouge: ROUGE-L, 1 and 2, BLEU-4; rouge_stemmed: of stems. bleu: the same, BLEU-4
            first. dialogue: BLEU-1 and 2, distinct words and pairs. answers: F1 and exact match
            as in SQuAD.
        evaluate_rows: Texts are written for the first N rows of an evaluation during training;
            0: for none.
        evaluate_beams: Beams of these evaluations; 1: greedy.
        """

class MaskedWords(_MaskedWords):
    """Predicts masked words."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        rate: float = 0.15,
        whole_words: bool = True,
        mask_rate: float = 0.8,
        random_rate: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        rate: Share of the tokens to predict, without special tokens; at least one word.
        whole_words: Mask whole words; otherwise single tokens.
        mask_rate: Share of the predicted tokens replaced by [MASK].
        random_rate: Share of the predicted tokens replaced by a random token; the rest stays
            unchanged.
        """

class Matching(_Matching):
    """Predicts whether, or how well, two texts match."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        labels: Sequence[str] = (),
        strategy: Literal["pointwise", "pairwise"] = "pointwise",
        margin: float = 0.5,
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        labels: Class names in order; by default those in the training rows, numbers in
            numerical order, then others alphabetically.
        strategy: Train on labelled pairs, or on a better and a worse text_b for the same
            text_a.
        margin: Pairwise: required difference between the probabilities of the better and the
            worse text.
        dropout: Dropout on the input of the head during training.
        """

class MultiLabel(_MultiLabel):
    """Predicts any number of classes."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        labels: Sequence[str] = (),
        threshold: float = 0.5,
        separator: str = ",",
        nothing: str = "none",
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        labels: Class names in order; by default those in the training rows, numbers in
            numerical order, then others alphabetically.
        threshold: Minimum probability at which a class is predicted.
        separator: Separator between the classes in a text cell.
        nothing: Cell value for a row without classes (in list cells: an empty list).
        dropout: Dropout on the input of the head during training.
        """

class MultipleChoice(_MultipleChoice):
    """Predicts one of the choices of a row."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        choices: str = "choices",
        answers: Literal["", "number", "letter", "text"] = "",
        count_from: int = -1,
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        choices: Column of the choices.
        answers: Format of labels: the number of a choice, its letter (A, B, ...), or its text;
            by default detected in the training rows.
        count_from: Number of the first choice; by default 0 or 1, as detected in the training
            rows.
        dropout: Dropout on the input of the head during training.
        """

class Ranking(_Ranking):
    """Ranks candidates within groups."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        relevant_from: float = 1.0,
        group: str = "",
        k: int = 10,
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        relevant_from: Minimum grade of a relevant candidate.
        group: Column that identifies the group of a row; by default qid, else text_a.
        k: Number of top candidates that nDCG evaluates.
        dropout: Dropout on the input of the head during training.
        """

class Reading(_Reading):
    """Extracts answers from a context."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = ...,
        label_column: str = "answers",
        max_length: int = 0,
        stride: int = 128,
        max_query: int = 64,
        max_answer: int = 0,
        n_best: int = 20,
        unanswerable: bool | None = None,
        null_threshold: float = 0.0,
        answer: Literal["first", "random"] = "first",
        score: Literal["auto", "squad1", "squad2", "cmrc"] = "auto",
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Columns of the question and of the context.
        label_column: Column of the answers.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        stride: Tokens between the starts of consecutive windows of a context.
        max_query: Maximum tokens of a question; longer ones are truncated.
        max_answer: Maximum tokens of a predicted answer; 0: 30, or 100 if the training contexts
            are mostly Chinese.
        n_best: Number of distinct answers to list, with their probabilities relative to each
            other.
        unanswerable: Whether questions may have no answer. If true, windows without the answer
            are trained as such, and no answer is predicted if it scores better; if false, such
            windows are not trained on. By default true if a training row is marked
            `impossible`.
        null_threshold: With `unanswerable`: predict no answer if it outscores the best answer
            by more than this.
        answer: Training target if a window contains several answers: the first in the row, or a
            random one each time.
        score: Scoring rules: SQuAD 1.1 or 2.0, or CMRC2018 (and DRCD). auto: squad2 if a
            training row is marked `impossible`, else cmrc if the contexts are mostly Chinese,
            else squad1.
        """

class Regression(_Regression):
    """Predicts a number."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        low: float | None = None,
        high: float | None = None,
        scale: bool = True,
        mean: float = 0.0,
        deviation: float = 0.0,
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        low: Minimum; lower predictions are clipped to it.
        high: Maximum; higher predictions are clipped to it.
        scale: Learn standardised targets: minus their mean, divided by their standard
            deviation.
        mean: With `scale`: mean of the targets, computed from the training rows.
        deviation: With `scale`: standard deviation of the targets; 0: compute both from the
            training rows.
        dropout: Dropout on the input of the head during training.
        """

class Retrieval(_Retrieval):
    """Trains vectors to find texts by queries."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        pooling: Literal["mean", "cls"] = "mean",
        similarity: Literal["cosine", "dot"] = "cosine",
        matryoshka: Sequence[int] = (),
        matryoshka_weights: Sequence[float] = (),
        negatives: Literal["auto", "need", "ignore"] = "auto",
        temperature: float = 0.05,
        margin: float = 0.0,
        distillation: Literal["", "kl", "margin_mse"] = "",
        distillation_share: float = 1.0,
        k: int = 10,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of one text, including [CLS] and [SEP]; 0: the length of a
            row. All texts of a table row share a row of the batch, so `length` should be as
            long as they are together.
        pooling: A text's vector: the mean over its tokens, or that of [CLS].
        similarity: How two vectors are compared.
        matryoshka: Train the first numbers of vectors too, as in [64, 128]: they can then be
            truncated to 64 or 128 (Kusupati et al. 2022).
        matryoshka_weights: Weights of their losses, one each; that of whole vectors is 1.
            Default: 1 each.
        negatives: The column `negatives`, texts that are not what the query asks for: use it if
            there is one; need it; or ignore it.
        temperature: Similarities are divided by it: the smaller, the more the hardest negatives
            count.
        margin: By how much a positive should be more similar than a negative (Yang et al.
            2019).
        distillation: Learn the column `teacher_scores`, a teacher's score of the positive and
            of each negative: their softmax (Kullback-Leibler divergence), or their differences
            (Hofstätter et al. 2020).
        distillation_share: Share of the distillation in the loss; the rest is InfoNCE.
        k: Number of top texts that nDCG and recall evaluate.
        """

class Similarity(_Similarity):
    """Trains vectors whose similarity follows scored pairs."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "label",
        max_length: int = 0,
        pooling: Literal["mean", "cls"] = "mean",
        similarity: Literal["cosine", "dot"] = "cosine",
        matryoshka: Sequence[int] = (),
        matryoshka_weights: Sequence[float] = (),
        loss: Literal["cosent", "cosine"] = "cosent",
        temperature: float = 0.05,
        low: float | None = None,
        high: float | None = None,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Label column.
        max_length: Maximum tokens of one text, including [CLS] and [SEP]; 0: the length of a
            row. All texts of a table row share a row of the batch, so `length` should be as
            long as they are together.
        pooling: A text's vector: the mean over its tokens, or that of [CLS].
        similarity: How two vectors are compared.
        matryoshka: Train the first numbers of vectors too, as in [64, 128]: they can then be
            truncated to 64 or 128 (Kusupati et al. 2022).
        matryoshka_weights: Weights of their losses, one each; that of whole vectors is 1.
            Default: 1 each.
        loss: The order of all pairs of a step (CoSENT, Su 2022), or the squared difference of
            similarity and label, which is scaled to be from 0 to 1.
        temperature: CoSENT divides similarities by it.
        low: The label of texts that have nothing in common; default: the lowest of the training
            rows.
        high: The label of texts that mean the same; default: the highest of the training rows.
        """

class Tagging(_Tagging):
    """Predicts a tag for every word."""
    @classmethod
    def on(
        cls,
        *,
        train: Rows | Splits | None = None,
        dev: Rows | None = None,
        name: str = "",
        columns: Mapping[str, Any] | None = None,
        read: Mapping[str, Any] | None = None,
        mix_ratio: float = 1.0,
        weight: float = 1.0,
        share: str = "",
        task_id: int = -1,
        head_lr: float = 0.0,
        freeze: Sequence[str] = (),
        new_head: bool = False,
        batch: int = 0,
        auxiliary: bool = False,
        texts: Sequence[str] = (),
        label_column: str = "tags",
        max_length: int = 0,
        labels: Sequence[str] = (),
        scheme: str = "",
        trained_scheme: str = "",
        units: str = "",
        crf: bool = False,
        constrain: bool = False,
        overlap: int = 0,
        dropout: float = 0.1,
        reuse_head_with: str = "",
        set_as_aux: bool = False,
    ) -> TaskWithData:
        """The task with rows to train and evaluate on, for palm.Trainer.

        train, dev: files or rows (palm_ds/data/sources/row_inputs.py); a DatasetDict as `train` has
            both. Without `train` it reads the rows of the task it is blended with.
        columns: {role: column}; these and `read`, the other keys of a source's `read`, define
            how rows are read (docs/finetuning.md).
        mix_ratio: steps of this task per step of the reference task.

        weight: Weight of the task's loss in the total loss.
        share: Use the head and the task embedding of this other task, for example the same
            masked words chosen by another strategy in another stage, or one head for the data
            of two domains.
        task_id: Row of the task embedding for its texts. -1: corpus tasks get one each, in the
            recipe's order; table tasks get the row of `init_from`'s `export_task`, or 0.
        head_lr: Peak learning rate of its head; 0: the optimizer's `lr`.
        freeze: Patterns of parameters that this task's steps do not update
            (`backbone.layers.0.*`); its stages need `mix: step`.
        new_head: Initialise its head newly even if `init_from` has one with its name.
        batch: Examples per step, where the recipe's `batch` counts examples; 0: the recipe's
            number.
        auxiliary: Only supports the other tasks: its scores do not select the final weights.
        texts: Text columns; by default text_a and, if the training rows have it, text_b.
        label_column: Tag column; if the table has no `tags`, `spans` are read.
        max_length: Maximum tokens of an example, including [CLS] and [SEP]; 0: the length of a
            row.
        labels: Tags of the head; by default all tags of the scheme for the types in the
            training rows, grouped by type, O last.
        scheme: Scheme of the tags in the table and in predictions: BIO, IOB1, IOE1, IOE2,
            BIOES, IO, or `none` for tags that are not chunks; by default detected.
        trained_scheme: Scheme used for training; by default `scheme`.
        units: How to split a text without `tokens`: words or characters; by default characters
            if the training texts are mostly Chinese.
        crf: Score the tags of a sentence jointly with a CRF.
        constrain: Predict only sequences of tags that the scheme allows.
        overlap: Minimum overlap of the windows of a long sentence, in tokens; 0: a quarter of a
            window.
        dropout: Dropout on the input of the head during training.
        """
