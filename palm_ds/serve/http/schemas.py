"""Bodies of requests and answers, as /openapi.json describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Strict, Tag, model_validator
from pydantic.config import JsonDict

from palm_ds.common.errors import suggest
from palm_ds.common.messages import printable
from palm_ds.data.tasks.interfaces import Shows

_WRITTEN = r"^[^\x00]*[^\s\x00][^\x00]*$"
_MASKED = r"^[^\x00]*\[MASK\][^\x00]*$"
# What a schema says here, the service refuses with a message of its own.
Text = Annotated[str, Field(json_schema_extra={"minLength": 1, "pattern": _WRITTEN})]
Masked = Annotated[str, Field(json_schema_extra={"pattern": _MASKED})]
Flag = Annotated[bool, Strict()]
Id = Annotated[int, Strict(), Field(json_schema_extra={"minimum": 0})]
Layer = Annotated[int, Strict()]
_SOME: JsonDict = {"minItems": 1}
Ids = Annotated[list[Id], Field(json_schema_extra=_SOME)]
Pair = tuple[Text, Text]
Row = dict[str, Any]
Filter = Annotated[
    Row,
    Field(
        description='Only texts with this metadata, such as `{"lang": "en", "year": '
        '{">=": 2020}, "tag": ["a", "b"]}`.',
        examples=[{"lang": "en"}],
    ),
]
ModelName = Annotated[str, Field(description="Name of a model; by default the first that can.")]


class Body(BaseModel):
    """A request: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, given: object) -> object:
        """Names the right keys, which pydantic's own error does not."""
        keys = (str(key)[:40] for key in given) if isinstance(given, dict) else ()
        for key in (key for key in keys if key not in cls.model_fields):
            raise ValueError(f"no key `{printable(key)}`{suggest(key, cls.model_fields)}")
        return given


class EncodedTexts(Body):
    """Texts that a client has tokenized."""

    input_ids: list[Ids] = Field(
        [],
        description="Token ids of each text, instead of texts; with special tokens, as from "
        "`/tokenize`.",
        examples=[[]],
    )
    token_type_ids: list[Ids] = Field(
        [], description="Token types of these ids; by default 0.", examples=[[]]
    )


class PredictBody(EncodedTexts):
    inputs: list[Text | Annotated[list[str], Field(json_schema_extra=_SOME)] | Row] = Field(
        [],
        json_schema_extra=_SOME,
        description="Texts; pairs of texts (for tagging: lists of words); or rows by role, such as "
        '{"question": "...", "context": "..."}.',
        examples=[["a fine film", "two hours too long"]],
    )
    model: ModelName = ""


class EmbedBody(EncodedTexts):
    texts: list[Text | Pair] = Field(
        [],
        description="Texts, or pairs of texts; a pair is embedded as one input.",
        examples=[["a text", "another text"]],
        json_schema_extra=_SOME,
    )
    model: ModelName = ""
    pooling: Literal["mean", "cls", "max", "pooler"] | None = Field(
        None, description="How token vectors are pooled; by default as the server was started."
    )
    normalize: Flag | None = Field(
        None, description="Scale vectors to length 1; by default as the server was started."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Keep only the first dimensions (Matryoshka); by default all."
    )
    prompt: str | None = Field(
        None, max_length=2000, description="Put before every text; by default the model's own."
    )
    layers: list[Layer] | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Layers to average: 1 is the first, -1 the last, 0 the embeddings. By default "
        "the last.",
        examples=[[-1]],
    )
    concat: Flag = Field(False, description="Concatenate these layers instead.")
    tokens: Flag = Field(False, description="Return a vector per token instead of one per text.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: each text's vectors as little-endian float32."
    )


class FillMaskBody(Body):
    texts: list[Masked] = Field(
        json_schema_extra=_SOME, examples=[["The capital of [MASK] is Paris."]]
    )
    top: int = Field(5, ge=1, le=100, description="Number of predictions for each [MASK].")
    model: ModelName = ""


class RerankBody(Body):
    query: Text = Field(examples=["How tall is the tower?"])
    documents: list[Text] = Field(
        json_schema_extra=_SOME, examples=[["It is 330 m high.", "It was built in 1889."]]
    )
    top_n: int | None = Field(
        None, ge=1, description="Number of documents to return, the best; by default all."
    )
    task: str = Field(
        "", description="A ranking, matching or regression task; by default the best suited."
    )
    use: Literal["head", "vectors"] = Field(
        "head", description="head: score pairs with a head; vectors: compare embeddings."
    )
    model: ModelName = ""


class TokenizeBody(Body):
    texts: list[Text] = Field(json_schema_extra=_SOME, examples=[["a text"]])
    model: ModelName = ""


class SearchBody(Body):
    query: Text = Field(examples=["towers in France"])
    top: int = Field(10, ge=1, le=1000, description="Number of texts to return.")
    filter: Filter | None = None
    hybrid: Flag = Field(False, description="Search by words (BM25) as well as by vectors.")
    rerank: Flag = Field(
        False,
        description="Rerank the best 100 (or `top`) with the first head that scores pairs.",
    )


class NewText(Body):
    """A text for the index."""

    text: Text
    id: str = Field("", description="Replaces the text with this id; empty: a hash of the text.")
    title: str = ""
    metadata: Row = {}


class AddBody(Body):
    texts: list[NewText] = Field(
        json_schema_extra=_SOME,
        examples=[[{"id": "7", "text": "The tower is 330 m high.", "metadata": {"lang": "en"}}]],
    )


class DeleteBody(Body):
    """Either of the two."""

    ids: list[str] | None = Field(None, examples=[["7"]])
    filter: Filter | None = None


class OpenAIBody(BaseModel):
    """OpenAI's request; keys that only OpenAI uses are ignored."""

    input: (
        Text | Annotated[list[Text], Field(json_schema_extra=_SOME)] | Ids
        | Annotated[list[Ids], Field(json_schema_extra=_SOME)]
    )  # fmt: skip
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)


class RerankedText(BaseModel):
    """A document in a request of Jina's and Cohere's rerankers; its other keys are ignored."""

    text: Text


class JinaRerankBody(BaseModel):
    """The request of Jina's and Cohere's rerankers; keys that only they use are ignored."""

    query: Text
    documents: list[Text | RerankedText] = Field(json_schema_extra=_SOME)
    model: str = ""
    top_n: int | None = Field(
        None, ge=1, description="Number of documents to return, the best; by default all."
    )
    return_documents: Flag = False


class TeiBody(BaseModel):
    """A request of text-embeddings-inference; keys that only it uses are ignored."""

    truncate: Flag = Field(False, description="Whether longer texts may be truncated.")


class TeiEmbedBody(TeiBody):
    inputs: Text | Annotated[list[Text], Field(json_schema_extra=_SOME)]
    normalize: Flag = True
    dimensions: int | None = Field(None, ge=1)


class TeiSparseBody(TeiBody):
    inputs: Text | Annotated[list[Text], Field(json_schema_extra=_SOME)]


class TeiRerankBody(TeiBody):
    query: Text
    texts: list[Text] = Field(json_schema_extra=_SOME)
    raw_scores: Flag = Field(False, description="Log odds instead of a head's probabilities.")
    return_text: Flag = False


TeiText = Annotated[list[Text], Field(min_length=1, max_length=2)]


class TeiPredictBody(TeiBody):
    inputs: Text | TeiText | Annotated[list[TeiText], Field(min_length=1)] = Field(
        description="A text, a pair of texts, or lists of one or two texts."
    )
    raw_scores: Flag = Field(False, description="Logits instead of probabilities.")


def _form(key: str) -> Discriminator:
    """Tells two forms of a body apart: text-embeddings-inference's has this key."""

    def form(body: object) -> str:
        return TEI if isinstance(body, dict) and key in body else OWN

    return Discriminator(form)


TEI, OWN = "text-embeddings-inference", "own"
FORMS = (TEI, OWN)
"""Tags of a body's form, which are in the places of errors."""
AnyEmbedBody = Annotated[
    Annotated[EmbedBody, Tag(OWN)] | Annotated[TeiEmbedBody, Tag(TEI)], _form("inputs")
]
AnyRerankBody = Annotated[
    Annotated[RerankBody, Tag(OWN)] | Annotated[TeiRerankBody, Tag(TEI)], _form("texts")
]


class Predictions(BaseModel):
    model: str
    task: str
    predictions: list[Row] = Field(description="As in the files of `palm-ds predict`.")
    truncated: int = Field(description="Inputs that were too long for the task.")


class Embeddings(BaseModel):
    model: str
    embeddings: list[list[float]] | list[list[list[float]]] | list[str] = Field(
        description="For each text its vector, or those of its tokens; in base64 if requested."
    )
    size: int = Field(description="Dimensions of a vector.")
    tokens: list[int] = Field(description="Number of tokens of each text, after truncation.")
    truncated: int


class FilledTexts(BaseModel):
    model: str
    results: list[Row] = Field(description="As printed by `palm-ds fill-mask --json`.")


class Ranked(BaseModel):
    index: int = Field(description="The document's place in the request, from 0.")
    relevance_score: float


class Rankings(BaseModel):
    model: str
    task: str
    results: list[Ranked] = Field(description="The best first.")


class RerankedDocument(Ranked):
    document: RerankedText | None = None


class JinaRankings(BaseModel):
    id: str
    model: str
    results: list[RerankedDocument] = Field(description="The best first.")


class TeiRanked(BaseModel):
    index: int
    score: float
    text: str | None = None


class TeiLabel(BaseModel):
    label: str
    score: float


class TeiSparseValue(BaseModel):
    index: int = Field(description="Token id.")
    value: float


TeiVectors = list[list[float]]
TeiSparseVectors = list[list[TeiSparseValue]]
TeiLabels = list[TeiLabel] | list[list[TeiLabel]]
AnyEmbeddings = Embeddings | TeiVectors
AnyRankings = Rankings | list[TeiRanked]


class Tokens(BaseModel):
    model: str
    results: list[Row]


class Hit(BaseModel):
    index: int = Field(description="The text's row in the index.")
    id: str
    title: str
    text: str
    metadata: Row
    score: float = Field(
        description="Cosine of the vectors of text and query, or dot product if they are sparse; "
        "in a hybrid search the fused score; after reranking the head's score."
    )


class Hits(BaseModel):
    model: str
    results: list[Hit]


class AddedTexts(BaseModel):
    added: int = Field(description="Texts that are new or changed; unchanged ones do not count.")
    replaced: int = Field(description="Old texts with the same ids, which were removed.")
    ids: list[str] = Field(description="Ids of all texts of the request, in its order.")
    texts: int = Field(description="Number of texts in the index now.")


class DeletedTexts(BaseModel):
    deleted: int
    texts: int = Field(description="Number of texts in the index now.")


class OpenAIEmbedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="base64: little-endian float32.")


class OpenAIUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class OpenAIEmbeddings(BaseModel):
    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: OpenAIUsage


class OpenAIModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class OpenAIModels(BaseModel):
    object: Literal["list"]
    data: list[OpenAIModel]


class Status(BaseModel):
    status: str


class Reloaded(BaseModel):
    models: list[str]


class PageField(BaseModel):
    name: str
    role: str = Field(description="The field's key in a row of the request.")
    label: str
    lines: int
    value: str = Field(description="What the page shows in the field at first.")
    short: bool
    optional: bool
    listed: bool = Field(description="Whether its lines are a list of texts.")
    parsed: bool = Field(description="Whether it holds JSON, which is sent parsed.")


class PageForm(BaseModel):
    about: str
    fields: list[PageField]
    shows: Shows


class ServedTask(BaseModel):
    name: str
    kind: str
    texts: list[str] = Field(description="The roles of its texts, if the recipe names them.")
    labels: list[str]
    form: PageForm = Field(description="How the page at / asks for a row, and what it shows.")


class ServedEmbedding(BaseModel):
    size: int
    pooling: str | None
    normalize: bool
    max_length: int | None


class ServedModelInfo(BaseModel):
    name: str
    tasks: list[ServedTask]
    fill_mask: bool = Field(description="Whether it predicts masked words.")
    embedding: ServedEmbedding


class SearchInfo(BaseModel):
    texts: int = Field(description="Number of texts in the index; 0 without an index.")
    hybrid: bool = Field(description="Whether the index has words too, for hybrid searches.")
    rerank: bool = Field(description="Whether a model has a head that scores pairs.")


class Info(BaseModel):
    version: str
    models: list[ServedModelInfo]
    search: SearchInfo


class ErrorDetail(BaseModel):
    type: str
    code: int
    message: str
    request_id: str


class ErrorBody(BaseModel):
    error: ErrorDetail
