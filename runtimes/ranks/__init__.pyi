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
