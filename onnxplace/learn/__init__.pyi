from onnxplace.learn.curves import CurvePoint as CurvePoint, plot_curve as plot_curve, write_curve as write_curve
from onnxplace.learn.guided import (
    GuidedObserver as GuidedObserver,
    GuidedOptions as GuidedOptions,
    GuidedPoint as GuidedPoint,
    GuidedResult as GuidedResult,
    learn_guided as learn_guided,
)
from onnxplace.learn.learning import (
    LearnOptions as LearnOptions,
    LearnResult as LearnResult,
    learn_placeto as learn_placeto,
)
from onnxplace.learn.measured import MeasuredPoint as MeasuredPoint, learn_measured as learn_measured
from onnxplace.learn.order_statistics import FamilyStudy as FamilyStudy, summarise_study as summarise_study
from onnxplace.learn.problems import (
    LearningGraph as LearningGraph,
    draw_mixture as draw_mixture,
    draw_problems as draw_problems,
    read_problems as read_problems,
)
from onnxplace.learn.sequences import (
    SequenceLearnOptions as SequenceLearnOptions,
    SequencePoint as SequencePoint,
    learn_sequence as learn_sequence,
)
from onnxplace.learn.training_loop import Observer as Observer
from onnxplace.learn.traversal import StudyOptions as StudyOptions, StudyRow as StudyRow, run_study as run_study
