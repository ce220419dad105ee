"""Service behind a server, apart from HTTP: accepts requests within its limits and answers them."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from palm_ds.common.errors import UserError
from palm_ds.common.sparse_vectors import SparseVectors
from palm_ds.inference.embedder import EmbeddingSettings, Text
from palm_ds.inference.search.store import StoreBusyError
from palm_ds.inference.search.vectors import StoreError
from palm_ds.serve.limits import RequestError, ServingLimits
from palm_ds.serve.metrics import ServerMetrics
from palm_ds.serve.model_set import ModelSet, Served, open_set
from palm_ds.serve.requests import (
    Input,
    check_numbers,
    check_rows,
    check_text,
    embed_work,
    fill_work,
    predict_work,
    tokens_of,
)
from palm_ds.serve.scheduler import BatchReport, Scheduler, Work
from palm_ds.serve.served_model import ServedModel
from palm_ds.serve.token_ids import TokenIds

log = logging.getLogger(__name__)
T = TypeVar("T")
_PREPARING = 2  # threads that turn texts into tokens
_SEARCHING = 2  # threads that read an index
_RECENT = 0.2  # weight of the newest batch in the measured speed
_MAX_WAIT = 60  # seconds in a Retry-After at most


class Service:
    """Opened models, their scheduler, and the texts in work."""

    def __init__(self, models: ModelSet, served: Served, limits: ServingLimits) -> None:
        self.models, self.served, self.limits = models, served, limits
        self.draining = False
        self.metrics = ServerMetrics(lambda: self.in_work)
        self.in_work = 0
        """Texts that were accepted and are not answered yet."""
        self._texts_per_second = 0.0
        self._opening: asyncio.Task[list[str]] | None = None
        self._threads = ThreadPoolExecutor(_PREPARING, thread_name_prefix="prepare")
        self.searching = ThreadPoolExecutor(_SEARCHING, thread_name_prefix="search")
        self.changing = ThreadPoolExecutor(1, thread_name_prefix="change")
        """For additions to an index and deletions, of which SQLite makes one at a time. Others must
        not wait behind them: another program may keep them waiting."""
        self._scheduler = Scheduler(len(served.options.devices), self._observe)

    # ---- requests ----

    async def predict(
        self, task: str, inputs: Sequence[Input] | TokenIds, name: str, deadline: float
    ) -> tuple[ServedModel, list[dict[str, Any]], int]:
        """(model, a prediction for each input, truncated inputs)."""
        model = self.models.with_task(task, name)
        if isinstance(inputs, TokenIds):
            inputs.check(self.limits)
        else:
            check_rows([x if isinstance(x, dict) else {"": x} for x in inputs], self.limits)
        prepare = functools.partial(predict_work, model, task, inputs)
        predictions, cut = await self.answer_of(prepare, len(inputs), deadline)
        return model, predictions, cut

    async def embed(
        self,
        texts: Sequence[Text] | TokenIds,
        settings: Callable[[ServedModel], EmbeddingSettings],
        name: str,
        deadline: float,
        field: str = "texts",
    ) -> tuple[ServedModel, Any, list[int], int]:
        """(model, vectors, tokens of each text, truncated texts). The vectors are one array, or one
        for each text if those of tokens are asked for. `field`: the texts' name in messages."""
        model = self.models.named(name)
        self._check_texts(texts, field)
        how = settings(model)

        def prepare() -> Work:
            return check_numbers(embed_work(model, texts, how), how, self.limits)

        return model, *await self.answer_of(prepare, len(texts), deadline)

    async def embed_sparse(
        self, texts: Sequence[str], name: str, deadline: float, field: str = "texts"
    ) -> tuple[ServedModel, SparseVectors, int]:
        """(model, vectors, truncated texts), of a model whose vectors are sparse."""
        model = self.models.named(name)
        if not model.embedder.sparse:
            raise RequestError(
                404,
                f"{model.name} has dense vectors ({model.embedder.settings.pooling}); sparse ones "
                "are those of a model trained to give them, or of `--pooling splade`",
            )
        self._check_texts(texts, field)
        prepare = functools.partial(embed_work, model, texts, model.embedder.settings)
        vectors, _, cut = await self.answer_of(prepare, len(texts), deadline)
        return model, await self.in_thread(SparseVectors.of, vectors), cut

    def _check_texts(self, texts: Sequence[Text] | TokenIds, field: str) -> None:
        if isinstance(texts, TokenIds):
            texts.check(self.limits)
            return
        check_rows([{"": text} for text in texts], self.limits, field)
        for number, text in enumerate(texts):
            if isinstance(text, tuple):
                for part, each in enumerate(text):
                    check_text(each, f"{field}[{number}][{part}]", self.limits)

    async def fill(
        self, texts: Sequence[str], top: int, name: str, deadline: float
    ) -> tuple[ServedModel, list[dict[str, Any]]]:
        """(model, a record for each text)."""
        model = self.models.filling(name)
        check_rows([{"": text} for text in texts], self.limits, "texts")
        prepare = functools.partial(fill_work, model, texts, top)
        return model, await self.answer_of(prepare, len(texts), deadline)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        task: str,
        name: str,
        deadline: float,
        field: str = "documents",
    ) -> tuple[ServedModel, str, list[float]]:
        """(model, task, the score of each document), by a head that scores pairs. `field`: the
        documents' name in messages."""
        model, task = self.models.ranking(task, name)
        self._check_query(query, documents, field)
        return model, task, await self.pair_scores(model, task, query, documents, deadline)

    async def pair_scores(
        self, model: ServedModel, task: str, query: str, documents: Sequence[str], deadline: float
    ) -> list[float]:
        """The score of each document for a query, by a head."""
        pairs = [(query, document) for document in documents]
        prepare = functools.partial(predict_work, model, task, pairs)
        scores, _ = await self.answer_of(prepare, len(pairs), deadline)
        return [model.tasks[task].relevance(score) for score in scores]

    async def rerank_by_vectors(
        self,
        query: str,
        documents: Sequence[str],
        name: str,
        deadline: float,
        field: str = "documents",
    ) -> tuple[ServedModel, list[float]]:
        """(model, the cosine of the query and each document; of sparse vectors the dot product)."""
        model = self.models.named(name)
        self._check_query(query, documents, field)
        settings = replace(model.embedder.settings, normalize=not model.embedder.sparse)
        prepare = functools.partial(embed_work, model, [query, *documents], settings)
        vectors, _, _ = await self.answer_of(prepare, len(documents) + 1, deadline)
        return model, (vectors[1:] @ vectors[0]).tolist()

    def _check_query(self, query: str, documents: Sequence[str], field: str) -> None:
        check_text(query, "query", self.limits)
        check_rows([{"": text} for text in documents], self.limits, field)

    async def tokenize(
        self, texts: Sequence[str], name: str, deadline: float
    ) -> tuple[ServedModel, list[Any]]:
        """(model, the tokens of each text)."""
        model = self.models.named(name)
        check_rows([{"": text} for text in texts], self.limits, "texts")
        work = functools.partial(self.in_thread, tokens_of, model, texts)
        return model, await self.bounded(work, len(texts), deadline)

    async def answer_of(self, prepare: Callable[[], Work], texts: int, deadline: float) -> Any:
        """Prepare some work, queue it and wait for its answer. Raises RequestError."""

        async def answered() -> Any:
            work = await self.in_thread(prepare)
            return await asyncio.wrap_future(self._scheduler.submit(work))

        return await self.bounded(answered, texts, deadline)

    async def bounded(self, answered: Callable[[], Awaitable[T]], texts: int, deadline: float) -> T:
        """Await `answered` until the deadline, if there is room for `texts` texts. Raises
        RequestError."""
        self._admit(texts)
        try:
            return await asyncio.wait_for(answered(), max(deadline - time.monotonic(), 0))
        except TimeoutError:
            raise RequestError(504, "not answered in time; send fewer texts in a request") from None
        except StoreBusyError as error:
            raise RequestError(503, f"{error}; try again later", retry_after=self._wait()) from None
        except StoreError as error:
            log.error("%s", error)
            raise RequestError(500, str(error)) from None
        except UserError as error:
            raise RequestError(422, str(error)) from None
        finally:
            self.in_work -= texts

    def _admit(self, texts: int) -> None:
        """Raises RequestError if the server is stopping or its queue is full. An empty one takes
        any request: a query with as many documents as are allowed, or the texts that a head orders
        after a search, may be more than it holds, and to wait would not help."""
        if self.draining:
            raise RequestError(503, "this server is stopping", retry_after=1)
        if self.in_work and self.in_work + texts > self.limits.max_queue:
            raise RequestError(
                429,
                f"{self.in_work:,} texts are waiting, of at most {self.limits.max_queue:,}; try "
                "again later",
                retry_after=self._wait(),
            )
        self.in_work += texts

    def _wait(self) -> int:
        """Seconds until what is waiting should be done."""
        seconds = self.in_work / self._texts_per_second if self._texts_per_second else 1
        return min(max(math.ceil(seconds), 1), _MAX_WAIT)

    async def in_thread(
        self, function: Callable[..., T], *values: object, threads: Executor | None = None
    ) -> T:
        """The result of a function, in one of the threads that prepare requests or of others. It is
        not called any more if nobody waits for it when a thread is free."""
        call = functools.partial(function, *values)
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, call)

    def _observe(self, report: BatchReport) -> None:
        self.metrics.batch(report)
        speed = report.texts / max(report.seconds, 1e-6) * len(self.served.options.devices)
        self._texts_per_second += _RECENT * (speed - self._texts_per_second)

    # ---- models ----

    async def reload(self) -> list[str]:
        """Open all models again and use them from then on, even if nobody waits for it any more;
        returns their names. After an error the old ones stay. Raises RequestError."""
        if self._opening and not self._opening.done():
            raise RequestError(409, "another reload has not ended yet")
        self._opening = asyncio.create_task(self._reload())
        self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._opening)

    async def _reload(self) -> list[str]:
        try:
            old, opened = self.models, await asyncio.to_thread(open_set, self.served, log.info)
            self.models = opened
            if old.index is not None:
                old.index.stop()
        except Exception as error:
            self.metrics.reload("failed")
            log.error("reload failed, the old models stay: %s", error)
            raise RequestError(500, f"the old models stay: {error}") from error
        self.metrics.reload("done")
        log.info("reloaded %s", ", ".join(self.models.models))
        return list(self.models.models)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._scheduler.close()
        for threads in (self._threads, self.searching, self.changing):
            threads.shutdown()
        if self.models.index is not None:
            self.models.index.close()
