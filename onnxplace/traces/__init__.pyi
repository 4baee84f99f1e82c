from onnxplace.traces.chrome_format import chrome_trace as chrome_trace, read_segment_nodes as read_segment_nodes
from onnxplace.traces.comparison import (
    BusyShare as BusyShare,
    Difference as Difference,
    TimelineComparison as TimelineComparison,
    compare_timelines as compare_timelines,
)
from onnxplace.traces.timelines import (
    MAX_TRACED_REQUESTS as MAX_TRACED_REQUESTS,
    RequestTimeline as RequestTimeline,
    TraceRecorder as TraceRecorder,
    predict_stream as predict_stream,
    predict_timelines as predict_timelines,
)
