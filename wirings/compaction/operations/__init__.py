"""The operations of a program, one file for each kind.

`wirings.compaction.operation` describes what such a file defines. A new operation is listed in ``OPERATIONS``.
"""

from wirings.compaction.operation import Operation
from wirings.compaction.operations.activation import ACTIVATIONS, Activation
from wirings.compaction.operations.add import Add
from wirings.compaction.operations.add_map import AddMap
from wirings.compaction.operations.add_numbers import AddNumbers
from wirings.compaction.operations.affine import Affine
from wirings.compaction.operations.arrange import Arrange
from wirings.compaction.operations.attention import Attention
from wirings.compaction.operations.channel_norm import ChannelNorm
from wirings.compaction.operations.concat import Concat
from wirings.compaction.operations.constant import Constant
from wirings.compaction.operations.conv import Conv
from wirings.compaction.operations.crop import Crop
from wirings.compaction.operations.embedding import Embedding
from wirings.compaction.operations.experts import Experts, TopShares
from wirings.compaction.operations.flatten import Flatten
from wirings.compaction.operations.group_norm import GroupNorm
from wirings.compaction.operations.indexed_tokens import PickTokens, SumTokens
from wirings.compaction.operations.instance_norm import InstanceNorm
from wirings.compaction.operations.linear import Linear
from wirings.compaction.operations.mean import Mean
from wirings.compaction.operations.multiply import Multiply
from wirings.compaction.operations.multiply_map import MultiplyMap
from wirings.compaction.operations.pad import Pad
from wirings.compaction.operations.pooling import Pooling
from wirings.compaction.operations.recurrent import Recurrent
from wirings.compaction.operations.repeat_pixels import RepeatPixels
from wirings.compaction.operations.reshape import Reshape
from wirings.compaction.operations.roll import Roll
from wirings.compaction.operations.scatter_channels import ScatterChannels
from wirings.compaction.operations.select_channels import SelectChannels
from wirings.compaction.operations.torch_operator import InputRef, TorchOperator, WeightRef
from wirings.compaction.operations.weighted_sum import WeightedSum

__all__ = [
    "ACTIVATIONS",
    "OPERATIONS",
    "Activation",
    "Add",
    "AddMap",
    "AddNumbers",
    "Affine",
    "Arrange",
    "Attention",
    "ChannelNorm",
    "Concat",
    "Constant",
    "Conv",
    "Crop",
    "Embedding",
    "Experts",
    "Flatten",
    "GroupNorm",
    "InputRef",
    "InstanceNorm",
    "Linear",
    "Mean",
    "Multiply",
    "MultiplyMap",
    "Operation",
    "Pad",
    "PickTokens",
    "Pooling",
    "Recurrent",
    "RepeatPixels",
    "Reshape",
    "Roll",
    "ScatterChannels",
    "SelectChannels",
    "SumTokens",
    "TopShares",
    "TorchOperator",
    "WeightRef",
    "WeightedSum",
]

OPERATIONS: dict[str, type[Operation]] = {
    kind.__name__: kind
    for kind in (
        Conv, Linear, Affine, InstanceNorm, Activation, Add, Multiply, AddMap, Concat, SelectChannels, ScatterChannels,
        Pooling, Mean, Crop, Pad, Flatten, Reshape, Constant, Arrange, ChannelNorm, Attention, Embedding, MultiplyMap,
        GroupNorm, AddNumbers, RepeatPixels, Roll, Recurrent,
        PickTokens, SumTokens, TopShares, Experts,
        TorchOperator,
    )
}  # fmt: skip
"""All operations by name."""
