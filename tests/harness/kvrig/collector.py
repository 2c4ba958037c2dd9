"""A collector of traces: a real gRPC server that records the spans it is sent."""

import socket
import threading
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from .server import free_port
from .waiting import wait_until


class Span:
    """A span as it was received."""

    def __init__(self, span):
        self.trace, self.id, self.parent = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
        self.name, self.kind, self.flags = span.name, span.kind, span.flags
        self.start, self.end = span.start_time_unix_nano, span.end_time_unix_nano
        self.attributes = {pair.key: _value(pair.value) for pair in span.attributes}
        self.failure = span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None

    def __repr__(self):
        return f"{self.name} {self.attributes}"


def _value(value):
    return getattr(value, value.WhichOneof("value"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Records spans and what came with them. It may be stopped, and started again on its port."""

    def __init__(self, answer=None, credentials=None):
        """`answer(context)` may refuse a call, or return another response; `credentials` are for TLS."""
        self.port, self.answer, self.credentials = free_port(), answer, credentials
        self.server, self._lock = None, threading.Lock()
        self.all, self.resources, self.scopes, self.headers = [], [], [], []

    def start(self):
        """Listens from here on."""
        self.server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        address = f"127.0.0.1:{self.port}"
        if self.credentials:
            self.server.add_secure_port(address, self.credentials)
        else:
            self.server.add_insecure_port(address)
        self.server.start()
        return self

    def stop(self):
        """Closes its connections and its port; a second call does nothing."""
        server, self.server = self.server, None
        if server is not None:
            server.stop(None).wait()

    @property
    def flags(self):
        """Flags of a server that sends its traces here."""
        scheme = "https" if self.credentials else "http"
        return ["--enable-tracing", "--otlp-endpoint", f"{scheme}://localhost:{self.port}"]

    def Export(self, request, context):
        """The one call of OTLP."""
        response = self.answer(context) if self.answer else None
        with self._lock:
            self.headers.append(dict(context.invocation_metadata()))
            for resource in request.resource_spans:
                self.resources.append({pair.key: _value(pair.value) for pair in resource.resource.attributes})
                for scope in resource.scope_spans:
                    self.scopes.append(scope.scope.name)
                    self.all.extend(Span(span) for span in scope.spans)
        return response or trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, request=None):
        """Spans so far, of one request or of all."""
        with self._lock:
            return [span for span in self.all if request in (None, span.attributes["session_id"])]

    def wait(self, request, names, timeout=30):
        """{name: span} of a request, once exactly these have come."""
        wait_until(
            lambda: sorted(span.name for span in self.spans(request)) == sorted(names),
            timeout, f"spans {names} of {request}", interval=0.05,
        )  # fmt: skip
        return {span.name: span for span in self.spans(request)}


class Silent:
    """A port that accepts connections and never answers."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.flags = ["--enable-tracing", "--otlp-endpoint", f"http://127.0.0.1:{self.socket.getsockname()[1]}"]

    def close(self):
        """Refuses connections from here on."""
        self.socket.close()
