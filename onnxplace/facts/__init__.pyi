from onnxplace.facts.costs import (
    Profile as Profile,
    Quality as Quality,
    Repeat as Repeat,
    Source as Source,
)
from onnxplace.facts.placement import (
    Clusters as Clusters,
    Groups as Groups,
    Placement as Placement,
    Schedule as Schedule,
)
from onnxplace.facts.programs import (
    Emitted as Emitted,
    Instruction as Instruction,
    Route as Route,
    Routes as Routes,
    Segment as Segment,
    Segments as Segments,
)
from onnxplace.facts.rewriting import (
    MicroBatches as MicroBatches,
    Recomputation as Recomputation,
    ShardedKind as ShardedKind,
    Shards as Shards,
    SplitState as SplitState,
)
