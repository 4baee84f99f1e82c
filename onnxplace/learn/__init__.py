"""Training of placers that learn: graphs, the loop over updates, checkpoints, and learning curves."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "curves": "CurvePoint plot_curve write_curve",
        "guided": "GuidedObserver GuidedOptions GuidedPoint GuidedResult learn_guided",
        "learning": "LearnOptions LearnResult learn_placeto",
        "measured": "MeasuredPoint learn_measured",
        "order_statistics": "FamilyStudy summarise_study",
        "training_loop": "Observer",
        "traversal": "StudyOptions StudyRow run_study",
        "problems": "LearningGraph draw_mixture draw_problems read_problems",
        "sequences": "SequenceLearnOptions SequencePoint learn_sequence",
    },
)
