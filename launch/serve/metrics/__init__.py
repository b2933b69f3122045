"""What the server counts, by who counts it.

`front.py` has it all; `totals.py` and `requests.py` what the front sees, `speculation.py` and `engine.py` how drafting
and the rounds go, `models.py` requests by the model that they name, `triton.py` the engine under Triton's names. They
know numbers and the Prometheus format. They know no HTTP and no protocol.
"""

from launch.serve.metrics.front import FrontMetrics
from launch.serve.metrics.models import ModelRecorder, ModelRequest, Stage

__all__ = ["FrontMetrics", "ModelRecorder", "ModelRequest", "Stage"]
