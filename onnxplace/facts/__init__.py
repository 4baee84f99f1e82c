"""Facts, the results of passes: frozen records with their invariants as code.

    Model -> Shards, MicroBatches
    Model -> Profile -> Groups -> Clusters
                     -> Placement -> Schedule -> Segments -> Routes -> Emitted
                                  -> Streaming

An arrow means "makes stale": a new Profile drops Groups, Placement and all that derives from them.
"""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
