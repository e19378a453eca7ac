"""The daemon itself: moto's services behind the authorizer, on loopback, with an end."""

import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from trainyard.emulator.daemon import hold_daemon_lock, new_credentials
from trainyard.emulator.info import ACCOUNT, CONTROL_PREFIX, INFO_FILE, REGION, EmulatorInfo, write_info
from trainyard.errors import InputError
from trainyard.importing import importing

_IDLE_CHECK_SECONDS = 2.0
_OBJECT_IN_MEMORY_BYTES = 16 * 1024 * 1024
"""Larger S3 objects go to a temporary file."""


def serve(state_dir: Path, *, port: int, idle_exit_seconds: float, training_argv: list[str] | None) -> None:
    """Serve until SIGTERM, SIGINT or `idle_exit_seconds` without a request (0: never); `port` 0 takes a free one."""
    state_dir = state_dir.resolve()
    state_dir.mkdir(parents=True, exist_ok=True)
    hold_daemon_lock(state_dir)
    access_key, secret_key = new_credentials()
    _read_descriptions_once()
    with importing():
        server = _bind(port)
        endpoint = f"http://localhost:{server.server_port}"
        info = EmulatorInfo(
            endpoint=endpoint,
            port=server.server_port,
            pid=os.getpid(),
            account=ACCOUNT,
            region=REGION,
            admin_access_key_id=access_key,
            admin_secret_access_key=secret_key,
            instance_id=os.urandom(8).hex(),
        )
        application, jobs, functions = _build(info, state_dir, training_argv)
    activity = _Activity(application)
    server.app = activity
    stopping = threading.Event()

    def stop(signum: int, frame: Any) -> None:
        stopping.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True, name="http").start()
    write_info(state_dir, info)
    print(f"serving on {endpoint}", flush=True)
    while not stopping.wait(_IDLE_CHECK_SECONDS):
        if jobs.any_running():
            activity.touch()
        if idle_exit_seconds and time.monotonic() - activity.last > idle_exit_seconds:
            print(f"no request for {idle_exit_seconds:.0f} s", flush=True)
            break
    # The file goes first, so that nobody finds an emulator that is about to end; then the jobs' processes.
    (state_dir / INFO_FILE).unlink(missing_ok=True)
    jobs.shut_down()
    functions.shut_down()
    server.shutdown()
    print("stopped", flush=True)
    sys.stdout.flush()
    os._exit(0)  # threads of half-read requests must not keep the process


def _read_descriptions_once() -> None:
    """Each session would read the services' descriptions anew, moto's EC2 alone its own three times."""
    import botocore.session

    create = botocore.session.create_loader

    class Paths(list[str]):
        """boto3 appends its own at each session."""

        def append(self, path: str) -> None:
            if path not in self:
                super().append(path)

    @cache
    def created(*stated: Any) -> Any:
        loader = create(*stated)
        loader._search_paths = Paths(dict.fromkeys(loader._search_paths))
        return loader

    botocore.session.create_loader = created


class _Activity:
    """Passes requests on and remembers when the last one ended."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.last = time.monotonic()

    def touch(self) -> None:
        """Count as active now."""
        self.last = time.monotonic()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        if not environ.get("PATH_INFO", "").startswith(f"{CONTROL_PREFIX}health"):  # being looked at isn't being used
            self.touch()
        return self._application(environ, start_response)


def _bind(port: int) -> Any:
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import ThreadedWSGIServer

    class Handler(MotoRequestHandler):  # type: ignore[misc]  # werkzeug's classes are untyped here
        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            pass

    class Server(ThreadedWSGIServer):  # type: ignore[misc]
        daemon_threads = True
        request_queue_size = 128

        def __init__(self) -> None:
            super().__init__("127.0.0.1", port, _not_ready, handler=Handler)

        def log(self, type: str, message: str, *args: Any) -> None:
            if type == "error":
                print(message % args if args else message, file=sys.stderr, flush=True)

    try:
        return Server()
    except (OSError, SystemExit) as error:  # werkzeug turns an occupied port into SystemExit
        reason = getattr(error, "strerror", None) or "it is in use"
        raise InputError(
            f"port {port} on 127.0.0.1 can't be used ({reason}); choose another or leave the port out"
        ) from None


def _not_ready(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    start_response("503 Service Unavailable", [("Content-Length", "0")])
    return []


def _build(info: EmulatorInfo, state_dir: Path, training_argv: list[str] | None) -> tuple[Any, Any, Any]:
    """The WSGI application (control endpoints, authorizer, moto), and the training jobs and functions behind it."""
    os.environ["MOTO_ACCOUNT_ID"] = info.account
    os.environ["MOTO_IAM_LOAD_MANAGED_POLICIES"] = "true"  # the CDK bootstrap attaches some
    os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(_OBJECT_IN_MEMORY_BYTES)
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    from trainyard.emulator import backends, limits, pages, resource_policies
    from trainyard.emulator.authorization.middleware import Authorizer, OwnService
    from trainyard.emulator.batch import api as batch_api
    from trainyard.emulator.batch.service_jobs import ServiceJobs
    from trainyard.emulator.cloudformation import engine, registry
    from trainyard.emulator.control import ControlEndpoints
    from trainyard.emulator.functions import api as functions_api
    from trainyard.emulator.functions.events import EventBus
    from trainyard.emulator.functions.runs import Functions
    from trainyard.emulator.pricing import api as pricing_api
    from trainyard.emulator.pricing.offers import Offers
    from trainyard.emulator.pricing.price_list import PriceListService
    from trainyard.emulator.throttling import Throttle
    from trainyard.emulator.training import api
    from trainyard.emulator.training.jobs import TrainingJobs
    from trainyard.emulator.training.quotas import QuotaService

    backends.install()
    engine.install()
    pages.install()
    resource_policies.install()
    limits.install()
    moto = DomainDispatcherApplication(create_backend_app)
    clients = registry.InProcessClients(
        moto, info.endpoint, info.admin_access_key_id, info.admin_secret_access_key, info.region
    )
    registry.use_clients(clients)
    offers, throttle = Offers(), Throttle()
    pricing_api.install(offers)
    own: dict[str, OwnService] = {"pricing": PriceListService(offers)}
    authorizer = Authorizer(
        moto,
        account=info.account,
        admin_access_key_id=info.admin_access_key_id,
        throttle=throttle,
        own=own,
    )
    jobs = TrainingJobs(info, state_dir / "jobs", authorizer.principals, argv=training_argv)
    api.install(jobs)
    own["servicequotas"] = QuotaService(jobs)
    functions = Functions(info, state_dir / "functions", authorizer.principals)
    functions_api.install(functions)
    service_jobs = ServiceJobs(info, jobs, lambda queue: batch_api.capacity_now(info, queue))
    batch_api.install(service_jobs)
    authorizer.principals.service_job_tags = service_jobs.tags
    bus = EventBus(info, functions)
    jobs.listen(bus.job_changed)
    service_jobs.listen(bus.service_job_ended)
    more = {"prices": offers.replace, "throttle": throttle.plan}
    return ControlEndpoints(authorizer, info, jobs, bus, more), jobs, functions
