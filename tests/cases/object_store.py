"""A real S3 server on this machine, over HTTP: moto's."""

import contextlib
import logging
import os
import pathlib
import uuid
from collections.abc import Iterator

import pytest

from tests.cases import storage
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher

BUCKET = "bucket"


class Server:
    """Keeps what it is given until its process ends, also while stopped."""

    def __init__(self, port: int = 0):
        moto = pytest.importorskip("moto.server")
        self._make = moto.ThreadedMotoServer
        # One line for each request.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = self._make("127.0.0.1", port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()
        self.url = f"s3://{BUCKET}"
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def put(self, key: str, content: bytes) -> None:
        """Stores an object as another program may, under any name."""
        import boto3

        boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=content)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self._server = self._make("127.0.0.1", self.port, verbose=False)
            self._server.start()

    def stop(self) -> None:
        """Ends the server; its objects stay in this process."""
        self._server.stop()


def azure_container() -> str:
    """Returns the URL of a new container of Azurite, where one is at work.

    It comes from npm: `azurite-blob --skipApiVersionCheck`. The variable is
    that of Azure's own programs.
    """
    where = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if "127.0.0.1" not in where:
        pytest.skip("AZURE_STORAGE_CONNECTION_STRING names no local Azurite")
    adlfs = pytest.importorskip("adlfs")
    name = f"test{uuid.uuid4().hex}"
    adlfs.AzureBlobFileSystem(connection_string=where).mkdir(name)
    return f"az://{name}"


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """Serves an empty bucket, which the environment then names."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    import boto3
    from moto import backends

    server = Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        filesystem._connected.cache_clear()
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        try:
            yield server
        finally:
            filesystem._connected.cache_clear()
            server.stop()
            backends.get_backend("s3").reset()


@contextlib.contextmanager
def exchange(
    kind: str, directory: pathlib.Path
) -> Iterator[publisher.Exchange]:
    """An exchange of a kind: "local", "no_rename" or "s3"."""
    if kind == "s3":
        with serve() as server:
            yield publisher.Exchange(f"{server.url}/run")
        return
    no_rename = storage.NoDirectoryRename() if kind == "no_rename" else None
    yield publisher.Exchange(str(directory), file_system=no_rename)
