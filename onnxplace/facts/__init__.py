"""Facts, the results of passes: frozen records with their invariants as code.

    Model -> Shards, MicroBatches
    Model -> Profile -> Groups -> Clusters
                     -> Placement -> Schedule -> Segments -> Routes -> Emitted

An arrow means "makes stale": a new Profile drops Groups, Placement and all that derives from them.
"""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "costs": "Profile Quality Repeat Source",
        "placement": "Clusters Groups Placement Schedule",
        "programs": "Emitted Instruction Route Routes Segment Segments",
        "rewriting": "MicroBatches Recomputation ShardedKind Shards SplitState",
    },
)
