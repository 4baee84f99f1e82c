from onnxplace.runtimes.ranks.cluster import (
    Cluster as Cluster,
    LedCluster as LedCluster,
    RemoteCluster as RemoteCluster,
    find_job as find_job,
    plan_job as plan_job,
    serve_rank as serve_rank,
)
from onnxplace.runtimes.ranks.opening import Opening as Opening
from onnxplace.runtimes.ranks.rank_engine import open_ranks as open_ranks
from onnxplace.runtimes.ranks.rank_plans import (
    RankPlan as RankPlan,
    plan_copies as plan_copies,
    plan_ranks as plan_ranks,
    require_copy_count as require_copy_count,
)
