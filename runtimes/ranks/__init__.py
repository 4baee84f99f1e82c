"""Run a bundle on ranks of MPI: a process per device, on one host or several."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.runtimes.ranks.cluster import Cluster as Cluster
    from onnxplace.runtimes.ranks.copy_plans import plan_copies as plan_copies, require_copy_count as require_copy_count
    from onnxplace.runtimes.ranks.leader import (
        LedCluster as LedCluster,
        find_job as find_job,
        plan_job as plan_job,
        serve_rank as serve_rank,
    )
    from onnxplace.runtimes.ranks.opening import Opening as Opening
    from onnxplace.runtimes.ranks.plan import RankPlan as RankPlan, plan_ranks as plan_ranks
    from onnxplace.runtimes.ranks.rank_engine import make_engine as make_engine
    from onnxplace.runtimes.ranks.remote_cluster import RemoteCluster as RemoteCluster

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cluster": "Cluster",
        "copy_plans": "plan_copies require_copy_count",
        "leader": "LedCluster find_job plan_job serve_rank",
        "opening": "Opening",
        "plan": "RankPlan plan_ranks",
        "rank_engine": "make_engine",
        "remote_cluster": "RemoteCluster",
    },
)
