"""The Python API, with PaddlePALM's names, on top of the recipes and the engine of the commands.

Backbone + tasks on their files ──Trainer, MultiHeadTrainer──> Recipe, RunSpec ──> trained as by
`palm-ds finetune`
"""

from palm_ds.api import events as event
from palm_ds.api.callbacks import Callback
from palm_ds.api.loaded_model import LoadedModel, load
from palm_ds.api.pretrained import Backbone
from palm_ds.api.trainer import MultiHeadTrainer, Trainer
from palm_ds.data.tasks.task import CorpusTask, TableTask, Task
from palm_ds.data.tasks.task_with_data import TaskWithData
from palm_ds.model.encoder.encoder import Encoder
from palm_ds.model.encoder.layer import EncoderLayer, LayerSpec
from palm_ds.model.encoder.transformer import TransformerEncoder, TransformerSpec
from palm_ds.model.generation.generate import DecodingSettings
from palm_ds.model.heads.heads import Head, HeadOutput
from palm_ds.tasks.shared.text_task import ClassesTask, TextTask
from palm_ds.text.custom_tokenizer import CustomTokenizer
from palm_ds.train.recipe.lr_schedule import Schedule

__all__ = [
    "Backbone",
    "Callback",
    "ClassesTask",
    "CorpusTask",
    "CustomTokenizer",
    "DecodingSettings",
    "Encoder",
    "EncoderLayer",
    "TransformerEncoder",
    "LayerSpec",
    "TransformerSpec",
    "Head",
    "HeadOutput",
    "LoadedModel",
    "MultiHeadTrainer",
    "Schedule",
    "TableTask",
    "Task",
    "TaskWithData",
    "TextTask",
    "Trainer",
    "event",
    "load",
]
