"""A boto3 session whose every client talks to one endpoint.

The SageMaker SDK makes its own clients from our session and takes no endpoint, and AWS_ENDPOINT_URL in this
process's environment would also redirect whatever else runs in it. Imported only by verbs that reach AWS.
"""

from typing import Any

import boto3
from botocore.config import Config


class EndpointSession(boto3.Session):  # type: ignore[misc]  # boto3 has no types
    """boto3.Session with a default `endpoint_url`; None means AWS itself."""

    def __init__(self, *, endpoint_url: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.endpoint_url = endpoint_url

    def client(self, *args: Any, **kwargs: Any) -> Any:
        """A client at the session's endpoint."""
        return super().client(*args, **self._with_endpoint(kwargs))

    def resource(self, *args: Any, **kwargs: Any) -> Any:
        """A resource at the session's endpoint."""
        return super().resource(*args, **self._with_endpoint(kwargs))

    def _with_endpoint(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("endpoint_url") or self.endpoint_url is None:
            return kwargs
        # The emulator's, on this machine's loopback: a proxy would look for it on another.
        config = Config(proxies={}).merge(kwargs.get("config") or Config())
        return {**kwargs, "endpoint_url": self.endpoint_url, "config": config}
