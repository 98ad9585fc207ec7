"""The server: OpenAI's interface over HTTP, in front of an engine. It needs the extra `serve`."""

try:
    import jinja2 as _jinja2  # noqa: F401
    import prometheus_client as _prometheus_client  # noqa: F401
    import pydantic as _pydantic  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError as _error:
    raise ImportError(f"sympow serve needs {_error.name}: pip install 'sympow[serve]'") from None

from sympow.serving.http.app import make_app
from sympow.serving.http.chat import ChatTemplate
from sympow.serving.http.server import run_server
from sympow.serving.http.service import Limits, Service

__all__ = ["ChatTemplate", "Limits", "Service", "make_app", "run_server"]
