"""The options of all programs: their names, defaults and choices stay.

What somebody has written into a script, or a scheduler runs again, must mean
the same after an update.
"""

import importlib
import pathlib
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# `name=default{choices}`; `!` if the option is required, `~` if its default
# depends on the machine.
OPTIONS = {
    "launch.local": """
        workdir=! num_groups=1 workers_per_group=1 ps_per_group=0
        exchange=None on_group_failure=stop{continue|stop}
        start_timeout_secs=300.0 grace_secs=5.0 worker_restarts=None
        max_restarts=0 frozen_secs=3.0 stuck_secs=8.0 plain=False
        recipe=None override=[] profile_steps=None
    """,
    "launch.train": """
        recipe=! workdir=None override=[] profile_steps=None
        verbose=False print_config=False
    """,
    "launch.compare": """
        recipe=! workdir=! methods=None sweep=[] trials=4 override=[]
        target=final num_groups=2 workers_per_group=1 ps_per_group=0
        ensemble_size=2 learning_rate_scale=1.0 smoothing_weight=0.1
        weight_decay=0.1 tune=None tune_trials=2 tune_override=[]
        budget=per_group{per_group|total} jobs=1 report_only=False
    """,
    "launch.status": """
        exchange=None watch=False interval_secs=2.0 json=False
        check=False silent_secs=60.0
    """,
    "launch.doctor": """
        json=False plain=False no_reach=False no_tensorflow=False
        workdir=None
        wait_secs=60.0 limit_secs=60.0 recipe=None override=[]
    """,
    "launch.slurm": """
        workdir=! num_groups=1 workers_per_group=1 ps_per_group=0
        exchange=None recipe=None override=[] output=None submit=False
        cpus_per_worker=1 mem_per_worker=None gpus_per_worker=0
        time=None partition=None account=None constraint=None
        job_name=None sbatch=[] srun=[] max_restarts=3 max_requeues=100
        stop_secs=120 setup=None python=~ chdir=~ ports=15000-29999
    """,
    "launch.label": """
        teacher=! recipe=! output=! override=[] group=0 num_groups=1
        num_steps=None top_k=None num_samples=None
        dtype=float32{float16|float32} trust=False
    """,
    "launch.promote": """
        to=! group=0 step=None version_number=None exchange=None
        examples=None notes=None sign_key=None trust_graph=False
    """,
    "launch.quickstart": """
        workdir=~ recipe=digits num_groups=2 workers_per_group=2
        override=[]
    """,
    "launch.kubernetes": """
        form=!{job|jobset|tfjob} name=! image=! num_groups=1
        workers_per_group=1 ps_per_group=0 workdir=! exchange=None
        volume_claim=None mount_path=None output=None recipe=None
        override=[] namespace=None key_secret=None service_account=None
        cpus_per_worker=None memory_per_worker=None cpus_per_ps=None
        memory_per_ps=None gpus_per_worker=0 shm_size=1Gi
        run_as_user=None node_selector=[] toleration=[] env=[]
        max_restarts=10 start_timeout_secs=1800 keep_secs=None
        queue=None
    """,
    "launch.teach": """
        exchange=! group=0 port=8500 health_port=0 host=127.0.0.1
        model_name=default threads=4 canary=None probabilities=False
        tls_key=None tls_cert=None trust_graph=False
    """,
    "tfdistill.serving.command": """
        exchange=! group=0 port=8500 health_port=0 host=127.0.0.1
        model_name=default threads=4 canary=None probabilities=False
        tls_key=None tls_cert=None trust_graph=False
    """,
    "tfdistill.launcher.command": """
        workdir=! num_groups=1 workers_per_group=1 ps_per_group=0
        exchange=None on_group_failure=stop{continue|stop}
        start_timeout_secs=300.0 grace_secs=5.0 worker_restarts=None
        max_restarts=0 frozen_secs=3.0 stuck_secs=8.0 plain=False
    """,
    "tfdistill.status.command": """
        exchange=None watch=False interval_secs=2.0 json=False
        check=False silent_secs=60.0
    """,
    "tfdistill.doctor.command": """
        json=False plain=False no_reach=False no_tensorflow=False
        workdir=None
        wait_secs=60.0 limit_secs=60.0
    """,
    "tfdistill.slurm.group": """
        workdir=! exchange=None num_groups=1 workers_per_group=1
        ps_per_group=0 gpus_per_worker=0 ports=15000-29999
        cpus_per_worker=1 max_restarts=3 max_requeues=100 stop_secs=120
        python=~ srun=[]
    """,
    "tfdistill.slurm.task": """
        workdir=! exchange=None num_groups=1 workers_per_group=1
        ps_per_group=0 gpus_per_worker=0 ports=15000-29999 nodes=!
        failure_file=!
    """,
    "benchmarks.backup": """
        model=resnet50{resnet50|tiny} batch_size=16 rounds=9
        quick=False
    """,
    "benchmarks.criteo_input": """
        path=None rows=108000 batch_size=1024 field_size=10000 rounds=7
        quick=False
    """,
    "benchmarks.exchange_kills": """
        kills=2000 seed=0 exchange=None quick=False
    """,
    "benchmarks.labels": """
        parts=[coordinated,sampled,language_model,served,outage]
        exchange_models=[criteo_small,mlp] exchange_steps=100
        num_classes=32000 features=256 rows=512 num_sampled=1024 k=32 rounds=15
        num_seeds=6 language_steps=1500 served_units=1024
        served_batch_size=512 served_steps=24 outage_secs=120.0
        quick=False
    """,
    "benchmarks.mixing": """
        parts=[blocked,quasi_global,speeds] depth=50 width=64 num_peers=1
        rounds=9
        num_groups=4 alpha=0.1 image_size=8 num_train=20000 num_test=4000
        batch_size=32 num_steps=4000 rates=[0.005,0.01,0.02,0.04] sweep_seeds=1
        num_seeds=6 target_loss=0.35 limit_secs=60.0 speed_seeds=3
        quick=False
    """,
    "benchmarks.mixing_speeds_task": """
        scales=False waits=False fast_secs=0.00025 slow_secs=0.0005
        every_steps=40 look_every_steps=10 learning_rate=0.02
        limit_secs=60.0 seed=0
    """,
    "benchmarks.multiworker": """
        models=[mlp,cnn]{cnn|mlp|tiny} batches=[static,dynamic]
        steps_per_execution=[1,10] batch_size=128 steps=80 rounds=7
        timeout_secs=3000.0 task=False
        quick=False
    """,
    "benchmarks.parameter_server": """
        settings=[mlp,wide]{mlp|tiny|wide} steps_per_execution=[1,10]
        tf_keras=[tf_keras_new_whole,tf_keras_new_halves,tf_keras_new_min_size,tf_keras_legacy_whole,tf_keras_legacy_halves,tf_keras_legacy_min_size]
        keep=2 steps=200 epochs=3 rounds=5 rows=False bytes=False
        spreads=[1,10,100,1000] turn_timeout_secs=300.0
        quick=False
    """,
    "benchmarks.parameter_server_task": """
        task=! setting=! steps=! epochs=!
    """,
    "benchmarks.readme_plot": """
        runs=None figures=docs/results/quickstart/figures.json
        output=docs/images/quickstart.svg
    """,
    "benchmarks.recovery": """
        rounds=3 kinds=[dead,frozen,stuck]
        quick=False
    """,
    "benchmarks.bad_peers": """
        recipe=digits num_seeds=3 first_seed=0
        peers=[honest,base_rates,rotated,half_rotated] dies_at=[25,100]
        settings=[before,fading,compared]
        quick=False
    """,
    "benchmarks.same_numbers": """
        case=[] output=None against=None
        quick=False
    """,
    "benchmarks.soak": """
        workdir=None exchange=None
        faults=kill,stop,term,late,pause,disk_full,launcher_disk,corrupt,duplicate,forged,wrong,flood,half_open
        minutes=30.0 every_secs=30.0 calm_secs=60.0 num_groups=3
        workers_per_group=2 steps_per_second=5.0 trials=2 seed=0
        quick=False
        by=versions{predictions|versions|weights}
    """,
    "benchmarks.soak_task": """
        num_steps=! steps_per_second=0.0 backup_every_steps=50 seed=0
        by=versions{predictions|versions|weights}
    """,
    "benchmarks.step_cost": """
        models=[resnet50,mlp]{mlp|resnet50|tiny} batch_size=16
        mlp_batch_size=256 steps=2 rounds=25
        quick=False
    """,
    "benchmarks.summaries": """
        rounds=9 steps=400
        quick=False
    """,
    "benchmarks.teacher_refresh": """
        model=resnet50{resnet50|tiny} image_size=64 batch_size=8
        rounds=5
        quick=False
    """,
    "benchmarks.teacher_swaps": """
        num_swaps=200 warm_up_swaps=20 units=1024 batch_size=32
        quick=False
    """,
    "benchmarks.tensorboard_screenshots": """
        workdir=!
    """,
    "benchmarks.punish": """
        workdir=!
        faults=kill,stop,term,late,pause,disk_full,launcher_disk,corrupt,duplicate,forged,wrong,flood,half_open
        seed=0 minutes=5.0 every_secs=30.0 calm_secs=20.0
        quick=False
    """,
}


def _program(name):
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    return module.PROGRAM


def _written(defined, flag):
    value = flag.default
    if flag.name in defined.required:
        value = "!"
    elif str(value) in (sys.executable, str(pathlib.Path.cwd())):
        value = "~"
    elif str(value).startswith(str(ROOT)):
        value = "~"
    elif isinstance(value, list):
        value = f"[{','.join(map(str, value))}]"
    choices = getattr(flag.parser, "enum_values", [])
    if not choices or f"[{','.join(choices)}]" == value:
        return f"{flag.name}={value}"
    return f"{flag.name}={value}{{{'|'.join(sorted(choices))}}}"


@pytest.mark.parametrize("name", OPTIONS)
def test_a_program_has_the_options_it_always_had(name):
    defined = _program(name).defined()
    names = [n for names in defined.sections.values() for n in names]
    found = {_written(defined, defined.values[n]) for n in names}
    assert found == set(OPTIONS[name].split())


@pytest.mark.parametrize("name", OPTIONS)
def test_the_help_of_a_program_fits_a_terminal(name):
    program = _program(name)
    text = program.help()
    assert text.startswith(f"usage: {program.name} ")
    assert max(map(len, text.splitlines())) <= 80
    for option in OPTIONS[name].split():
        assert f"--{option.partition('=')[0]}" in text
    assert "--verbosity" in program.help(full=True)


def test_every_program_is_in_the_table():
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in ("benchmarks", "launch", "tfdistill")
        for path in (ROOT / folder).rglob("*.py")
        if "PROGRAM.start()" in path.read_text("utf-8")
        or "\n    start()" in path.read_text("utf-8")
    }
    assert {name.removesuffix(".__main__") for name in found} == set(OPTIONS)


def test_console_scripts_are_programs():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    scripts = tomllib.loads(text)["project"]["scripts"]
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        found = importlib.import_module(module)
        assert found.PROGRAM.name == name
        assert getattr(found, function) == found.PROGRAM.start


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
