"""Models: what the network must know of one, which can be served, and getting the weights that a stage needs.

`open_model` looks at configuration, tokenizer and the sizes of all weights; `Model.fetch` gets those of a range of
layers.
"""

from .checkpoint import Checkpoint, LayerRange
from .errors import ModelError
from .info import ModelInfo, WeightSizes
from .opening import BUNDLED, OpenedModel, open_model, read_json
from .progress import DownloadProgress, ProgressLine, Report, TerminalProgress

__all__ = [
    "BUNDLED",
    "Checkpoint",
    "DownloadProgress",
    "LayerRange",
    "ModelError",
    "ModelInfo",
    "OpenedModel",
    "ProgressLine",
    "Report",
    "TerminalProgress",
    "WeightSizes",
    "open_model",
    "read_json",
]
