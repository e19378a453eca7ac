"""Our resource types as moto's CloudFormation classes, and the in-process clients they work with."""

import functools
import io
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from moto.cloudformation.exceptions import ValidationError
from moto.core.common_models import CloudFormationModel

from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES
from trainyard.emulator.cloudformation.model import Created, ResourceType, Site, as_text

WsgiApp = Callable[[dict[str, Any], Any], Any]


class InProcessClients:
    """boto3 clients that hand requests to a WSGI application: no socket, no authorizer; AWS's own services calling."""

    def __init__(self, application: WsgiApp, endpoint: str, access_key: str, secret_key: str, region: str) -> None:
        self._application = application
        self._endpoint = endpoint
        self._credentials = {"aws_access_key_id": access_key, "aws_secret_access_key": secret_key}
        self._region = region
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, str], Any] = {}

    def __call__(self, service: str, region: str = "") -> Any:
        """The client of `service`, in the emulator's own region where none is named; made once, as loading a service
        model takes tens of milliseconds."""
        key = service, region or self._region
        with self._lock:  # boto3 sessions are not thread-safe while they make a client
            if key not in self._clients:
                session = boto3.session.Session(region_name=key[1], **self._credentials)
                config = Config(retries={"max_attempts": 0}, s3={"addressing_style": "path"})
                client = session.client(service, endpoint_url=self._endpoint, config=config)
                client.meta.events.register("before-send", self._send)
                self._clients[key] = client
        return self._clients[key]

    def _send(self, request: Any, **_: Any) -> AWSResponse:
        url = urlsplit(request.url)
        body = request.body or b""
        content = body.read() if hasattr(body, "read") else body.encode() if isinstance(body, str) else bytes(body)
        environ: dict[str, Any] = {
            "REQUEST_METHOD": request.method,
            "SCRIPT_NAME": "",
            "PATH_INFO": unquote(url.path or "/"),
            "RAW_URI": url.path + (f"?{url.query}" if url.query else ""),
            "REQUEST_URI": url.path + (f"?{url.query}" if url.query else ""),
            "QUERY_STRING": url.query,
            "SERVER_NAME": "localhost",
            "SERVER_PORT": str(url.port or 80),
            "SERVER_PROTOCOL": "HTTP/1.1",
            "REMOTE_ADDR": "127.0.0.1",
            "CONTENT_LENGTH": str(len(content)),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(content),
            "wsgi.input_terminated": True,
            "wsgi.errors": io.StringIO(),
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        for name, value in request.headers.items():
            text = value.decode() if isinstance(value, bytes) else str(value)
            key = name.upper().replace("-", "_")
            environ[key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"] = text
        environ["CONTENT_LENGTH"] = str(len(content))
        environ.setdefault("HTTP_HOST", url.netloc)
        return self._respond(request.url, environ)

    def _respond(self, url: str, environ: dict[str, Any]) -> AWSResponse:
        started: dict[str, Any] = {}

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
            started.update(status=int(status.split(maxsplit=1)[0]), headers=dict(headers))

        chunks = self._application(environ, start_response)
        content = b"".join(chunks)
        if hasattr(chunks, "close"):
            chunks.close()
        return AWSResponse(url, started["status"], started["headers"], _RawContent(content))


class _RawContent:
    """The part of urllib3's response that botocore reads."""

    def __init__(self, content: bytes) -> None:
        self._stream = io.BytesIO(content)

    def stream(self, **_: Any) -> Any:
        yield self._stream.read()

    def read(self, amt: int | None = None, **_: Any) -> bytes:
        return self._stream.read() if amt is None else self._stream.read(amt)


class _Services:
    """The clients that resource handlers use; set when the server is built."""

    clients: Callable[[str, str], Any] | None = None


def use_clients(clients: Callable[[str, str], Any]) -> None:
    """Let every resource type work through `clients`."""
    _Services.clients = clients


def _site(account_id: str, region_name: str) -> Site:
    clients = _Services.clients
    assert clients is not None, "the registry is used before the server was built"
    return Site(account_id, region_name, lambda service: clients(service, region_name))


class ManagedResource:
    """A resource of a stack, made by a ResourceType. Its attributes are what its API answered."""

    spec: ResourceType
    cf_resource_type: str
    logical_resource_id: str

    def __init__(self, physical_id: str, attributes: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
        self.physical_resource_id = physical_id
        self.attributes = dict(attributes)
        self.properties = properties

    def is_created(self) -> bool:
        """Always: our APIs are synchronous."""
        return True

    def get_cfn_attribute(self, attribute_name: str) -> Any:
        """Fn::GetAtt; an attribute that isn't there fails the deploy."""
        if attribute_name not in self.attributes:
            known = ", ".join(sorted(self.attributes)) or "none"
            raise ValidationError(
                message=f"the emulator's {self.spec.name} has no attribute {attribute_name} (known: {known})"
            )
        return self.attributes[attribute_name]

    def delete(self, account_id: str, region_name: str) -> None:
        """Remove it from its service."""
        self.spec.delete(_site(account_id, region_name), self.physical_resource_id, self.properties)

    def replaced_by_change(self, new: Mapping[str, Any]) -> bool:
        """Whether going to `new` properties needs another resource, as CloudFormation's "Update requires" says."""
        return self.spec.update is None or any(
            _at(self.properties, path) != _at(new, path) for path in self.spec.replaced_by
        )

    def change(self, new: Mapping[str, Any], account_id: str, region_name: str) -> None:
        """Update in place."""
        assert self.spec.update is not None
        changed = self.spec.update(_site(account_id, region_name), self.physical_resource_id, self.properties, new)
        if isinstance(changed, Created):
            self.physical_resource_id, changed = changed.physical_id, changed.attributes
        self.attributes.update(changed or {})
        self.properties = new


def _at(properties: Any, path: str) -> Any:
    for key in path.split("."):
        properties = properties.get(key) if isinstance(properties, Mapping) else None
    return as_text(properties) if isinstance(properties, bool | int) else properties  # 5 and "5", true and "true"


def _model_class(spec: ResourceType) -> type[Any]:
    """moto finds models among CloudFormationModel's direct subclasses; this makes one for `spec`."""

    def create(
        cls: Any, /, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **_: Any
    ) -> Any:
        properties = cloudformation_json.get("Properties", {})
        created = spec.create(_site(account_id, region_name), properties, resource_name)
        return cls(created.physical_id, created.attributes, properties)

    def never(cls: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError("the engine updates and deletes resources by their own methods")

    return type(
        spec.name.replace("::", ""),
        (ManagedResource, CloudFormationModel),
        {
            "spec": spec,
            "cloudformation_name_type": staticmethod(lambda: spec.name_property),
            "cloudformation_type": staticmethod(lambda: spec.name),
            "has_cfn_attr": classmethod(lambda cls, attribute: True),
            "create_from_cloudformation_json": classmethod(create),
            "update_from_cloudformation_json": classmethod(never),
            "delete_from_cloudformation_json": classmethod(never),
        },
    )


@functools.cache
def model_classes() -> Mapping[str, type[Any]]:
    """CloudFormation type to moto class, for every type of the catalogue."""
    return {name: _model_class(spec) for name, spec in RESOURCE_TYPES.items()}
