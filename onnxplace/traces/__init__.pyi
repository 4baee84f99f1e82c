from onnxplace.traces.chrome_format import chrome_trace as chrome_trace, read_segment_nodes as read_segment_nodes
from onnxplace.traces.timelines import (
    MAX_TRACED_REQUESTS as MAX_TRACED_REQUESTS,
    BusyShare as BusyShare,
    Difference as Difference,
    RequestTimeline as RequestTimeline,
    TimelineComparison as TimelineComparison,
    TraceRecorder as TraceRecorder,
    compare_timelines as compare_timelines,
    find_medians as find_medians,
    predict_stream as predict_stream,
    predict_timelines as predict_timelines,
)
