"""Fine-tuning tasks: one file each, read from tables of rows.

palm.tasks.Classification(smoothing=0.1).on(train="train.tsv", dev="dev.tsv")  # for palm.Trainer

The classes are imported when they are first asked for: `classification.py` holds `Classification`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors
    from palm_ds.tasks.class_pairs import ClassPairs as ClassPairs
    from palm_ds.tasks.classification import Classification as Classification
    from palm_ds.tasks.cross_modal_contrast import CrossModalContrast as CrossModalContrast
    from palm_ds.tasks.generation import Generation as Generation
    from palm_ds.tasks.image_text_matching import ImageTextMatching as ImageTextMatching
    from palm_ds.tasks.masked_regions import MaskedRegions as MaskedRegions
    from palm_ds.tasks.masked_words import MaskedWords as MaskedWords
    from palm_ds.tasks.matching import Matching as Matching
    from palm_ds.tasks.multi_label import MultiLabel as MultiLabel
    from palm_ds.tasks.multiple_choice import MultipleChoice as MultipleChoice
    from palm_ds.tasks.ranking import Ranking as Ranking
    from palm_ds.tasks.reading import Reading as Reading
    from palm_ds.tasks.referring_expressions import ReferringExpressions as ReferringExpressions
    from palm_ds.tasks.regression import Regression as Regression
    from palm_ds.tasks.retrieval import Retrieval as Retrieval
    from palm_ds.tasks.scene_graph_prediction import SceneGraphPrediction as SceneGraphPrediction
    from palm_ds.tasks.similarity import Similarity as Similarity
    from palm_ds.tasks.sparse_retrieval import SparseRetrieval as SparseRetrieval
    from palm_ds.tasks.tagging import Tagging as Tagging
else:

    def __getattr__(name: str) -> Any:
        """The class of a task."""
        from palm_ds.common.errors import suggest
        from palm_ds.data.tasks.task import find

        kinds = {} if name.startswith("_") else _kinds()
        if name not in kinds:
            raise AttributeError(f"module {__name__!r} has no task {name!r}{suggest(name, kinds)}")
        return find(kinds[name])


def __dir__() -> list[str]:
    return sorted(_kinds())


def _kinds() -> dict[str, str]:
    """{class name: kind} of every task here."""
    from palm_ds.data.tasks.task import known_kinds

    mine = [kind for kind, module in known_kinds().items() if module.startswith(f"{__name__}.")]
    return {"".join(part.title() for part in kind.split("_")): kind for kind in mine}
