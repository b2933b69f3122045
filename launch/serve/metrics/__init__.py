"""What the server counts, by who counts it.

`server_metrics.py` has all metrics and observes requests; `families.py` is the table of most of them, `models.py`
counts requests by the model that they name.
"""

from launch.serve.metrics.models import ModelRecorder, ModelRequest, Stage
from launch.serve.metrics.server_metrics import FrontendMetrics

__all__ = ["FrontendMetrics", "ModelRecorder", "ModelRequest", "Stage"]
