"""What the server counts, by who counts it: `front.py` requests, `models.py` Triton's models.

They know numbers and the Prometheus format. They know no HTTP and no protocol.
"""

from launch.serve.metrics.front import FrontMetrics
from launch.serve.metrics.models import ModelRecorder, ModelRequest, Stage

__all__ = ["FrontMetrics", "ModelRecorder", "ModelRequest", "Stage"]
