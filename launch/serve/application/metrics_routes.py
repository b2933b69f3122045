"""GET /metrics, for Prometheus: on a port of its own, and on the API's for whoever looks for it there.

It knows HTTP through Starlette. It does not know what is counted (`metrics`).
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from launch.serve.front.front import Front
from launch.serve.http.requests import Keys

METRICS_PATH = "/metrics"


def metrics_route(front: Front, keys: Keys) -> Route:
    """For an application.

    Args:
        front: whose metrics they are.
        keys: of which requests need one. The API's port may be reached by many, that of the metrics is the operator's.
    """

    async def metrics(request: Request) -> Response:
        keys.check(request)
        status = await front.client.ask_status()
        told = front.metrics.render(front.client.ready, status, is_hanging=front.door.is_hanging)
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    return Route(METRICS_PATH, metrics, methods=["GET"])
