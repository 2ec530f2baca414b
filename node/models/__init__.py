"""Models: what the network must know of one, which can be served, and the weights of a stage:
`open_model` reads configuration, tokenizer and weight sizes; `Model.fetch` gets layers."""

from .checkpoint import Checkpoint, StageLayers
from .errors import ModelError
from .info import ModelInfo, WeightSizes
from .opening import BUNDLED, BUNDLED_MODELS, OpenedModel, open_model, read_json
from .progress import DownloadProgress, ProgressLine, Report, TerminalProgress

__all__ = [
    "BUNDLED",
    "BUNDLED_MODELS",
    "Checkpoint",
    "DownloadProgress",
    "ModelError",
    "ModelInfo",
    "OpenedModel",
    "ProgressLine",
    "Report",
    "StageLayers",
    "TerminalProgress",
    "WeightSizes",
    "open_model",
    "read_json",
]
