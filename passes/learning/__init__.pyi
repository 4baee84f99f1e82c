from onnxplace.passes.learning.completions import (
    complete_steps as complete_steps,
    find_completions as find_completions,
    update_from_completions as update_from_completions,
)
from onnxplace.passes.learning.end_rewards import update_from_ends as update_from_ends
from onnxplace.passes.learning.environment import Environment as Environment, Episode as Episode
from onnxplace.passes.learning.gradients import require_torch as require_torch
from onnxplace.passes.learning.guided_files import (
    MOMENTS as MOMENTS,
    GuidedCheckpoint as GuidedCheckpoint,
    default_policy_path as default_policy_path,
    read_guided_checkpoint as read_guided_checkpoint,
    read_guided_policy as read_guided_policy,
    write_guided_policy as write_guided_policy,
)
from onnxplace.passes.learning.guided_gradients import (
    Example as Example,
    imitation_loss as imitation_loss,
    make_example as make_example,
)
from onnxplace.passes.learning.guided_graph import GuidedGraph as GuidedGraph
from onnxplace.passes.learning.guided_placing import (
    evaluate_schedule as evaluate_schedule,
    plan_with_policy as plan_with_policy,
)
from onnxplace.passes.learning.guided_policy import (
    GuidedPolicy as GuidedPolicy,
    GuidedShape as GuidedShape,
    run_schedule as run_schedule,
)
from onnxplace.passes.learning.networks import (
    COMPLETION_ROUNDS as COMPLETION_ROUNDS,
    ROUNDS as ROUNDS,
    LearnFrom as LearnFrom,
    Policy as Policy,
    Shape as Shape,
    hash_names as hash_names,
)
from onnxplace.passes.learning.placing import (
    coarsen_to as coarsen_to,
    commit_devices as commit_devices,
    commit_result as commit_result,
    place_with_policy as place_with_policy,
    recall_placement as recall_placement,
)
from onnxplace.passes.learning.policy_files import (
    read_learner as read_learner,
    read_policy as read_policy,
    require_devices as require_devices,
    write_policy as write_policy,
)
from onnxplace.passes.learning.sequences.sequence_files import (
    read_sequence_learner as read_sequence_learner,
    read_sequence_policy as read_sequence_policy,
    write_sequence_policy as write_sequence_policy,
)
from onnxplace.passes.learning.sequences.sequence_graph import (
    ListOrder as ListOrder,
    SequenceGraph as SequenceGraph,
)
from onnxplace.passes.learning.sequences.sequence_inputs import SequenceInputs as SequenceInputs
from onnxplace.passes.learning.sequences.sequence_learner import (
    SequenceLearner as SequenceLearner,
    SequenceSettings as SequenceSettings,
    SequenceUpdate as SequenceUpdate,
    sample_policy as sample_policy,
    update_sequence_policy as update_sequence_policy,
)
from onnxplace.passes.learning.sequences.sequence_placing import (
    SequenceOptions as SequenceOptions,
    load_policy as load_policy,
    place_with_sequence as place_with_sequence,
)
from onnxplace.passes.learning.sequences.sequence_policy import (
    GroupsFrom as GroupsFrom,
    Heads as Heads,
    Kind as Kind,
    SequencePolicy as SequencePolicy,
    SequenceShape as SequenceShape,
)
from onnxplace.passes.learning.teacher import Lesson as Lesson, search_lesson as search_lesson
from onnxplace.passes.learning.training import (
    Learner as Learner,
    Settings as Settings,
    Update as Update,
    update_policy as update_policy,
)
from onnxplace.passes.learning.visiting_orders import (
    ORDERS as ORDERS,
    Order as Order,
    Reward as Reward,
    Start as Start,
    visit_nodes as visit_nodes,
)
