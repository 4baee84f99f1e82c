"""What an ONNX file says of its model besides the graph."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ModelMetadata(BaseModel):
    """What an ONNX file says of its model, and its name: ONNX Runtime's `ModelMetadata`. No result depends on it."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    file_name: str = ""
    """Name of the file without its folder; empty if the model was given as an object."""
    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = {}
