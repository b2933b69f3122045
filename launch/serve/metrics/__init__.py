"""What the server counts, by who counts it.

`front.py` has it all, and observes requests; `families.py` is the table of most, `models.py` has requests by the model
that they name, `triton.py` the engine under Triton's names. They know numbers and the Prometheus format. They know no
HTTP and no protocol.
"""

from launch.serve.metrics.front import FrontMetrics
from launch.serve.metrics.models import ModelRecorder, ModelRequest, Stage

__all__ = ["FrontMetrics", "ModelRecorder", "ModelRequest", "Stage"]
