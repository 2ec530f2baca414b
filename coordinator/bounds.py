"""What boxes may say at most: types of numbers, names and counts that are checked when a message is decoded.

Each bound lies above anything that exists and far below what would hurt: what is read from another
box is multiplied, allocated and enumerated here.
"""

from typing import Annotated, Final

from msgspec import Meta

MAX_GPUS: Final = 64  # of one box
MAX_LAYERS: Final = 4096
MAX_REPLICAS: Final = 4096
MAX_STAGES: Final = 64  # of one replica
MAX_CUTS: Final = 16  # of one box: so many numbers divide no number of GPUs
MAX_REFUSED: Final = 32  # boxes of a plan that keep their part
MAX_PAIRINGS: Final = 1 << 16
MAX_SERVICES: Final = 32  # of one network: a plan is made and kept for each
MAX_FIGURE: Final = 1e12

Name = Annotated[str, Meta(min_length=1, max_length=128)]  # of a peer, a replica, a codec
ModelName = Annotated[str, Meta(min_length=1, max_length=512)]  # of a model or service: often a path
Text = Annotated[str, Meta(max_length=2000)]  # for people
Counter = Annotated[int, Meta(ge=0, le=2**53)]  # epochs and versions: a double holds each
Layer = Annotated[int, Meta(ge=0, le=MAX_LAYERS)]
Degree = Annotated[int, Meta(ge=1, le=MAX_GPUS)]  # of tensor parallelism
Size = Annotated[int, Meta(ge=1, le=1 << 24)]  # of one dimension of a model
Count = Annotated[int, Meta(ge=0, le=1 << 48)]  # of bytes, tokens, steps: 256 TiB
Figure = Annotated[float, Meta(ge=0.0, le=MAX_FIGURE)]  # neither NaN nor infinite
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]
Tokens = Annotated[int, Meta(ge=1, le=1 << 31)]
