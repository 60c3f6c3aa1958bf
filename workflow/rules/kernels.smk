# Records of a run that was stopped wait here for the next, which goes on with them; a change of kernels starts afresh.
KERNEL_SOURCE = source_digest("bench", "ops", "dispatch", "jit.py") + jit.source_hash(
    "lora"
)
UNFINISHED = f".cache/loraforge/kernel_bench/{KERNEL_SOURCE[:12]}{KERNEL_SOURCE[64:76]}"

# where the ranks of mixed batches come from: the newest measured spectra that are committed
SPECTRA = [
    f"{bag}/data/records.jsonl"
    for (study, _), bag in EVIDENCE.items()
    if study == "spectra"
][:1]


ENGINES = ".cache/loraforge/engines"


rule fetch_engines:
    """LoRA kernels of SGLang and vLLM, from their wheels; Python files alone."""
    output:
        directory(ENGINES),
    log:
        f"{RESULTS}/logs/fetch_engines.log",
    conda:
        "../../envs/core.yaml"
    params:
        source=source_digest("bench/native/sites.py"),
    message:
        "Fetch the engines' kernels"
    shell:
        "loraforge bench engines {output} --force 2>&1 | tee {log}"


rule bench_kernels:
    """Every serving kernel of ours and of the engines, checked and timed in one run on the GPU."""
    input:
        engines=ENGINES,
        spectra=SPECTRA,
    output:
        expand(f"{RESULTS}/kernels/{{study}}.jsonl", study=KERNEL_STUDIES),
    log:
        f"{RESULTS}/logs/bench_kernels.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    resources:
        gpu=1,
    params:
        unfinished=UNFINISHED,
        folder=subpath(output[0], parent=True),
        spectra=lambda wildcards, input: (
            f"--spectra {input.spectra[0]}" if input.spectra else ""
        ),
        workers=CONFIG.kernels.workers,
        source=KERNEL_SOURCE,
    message:
        "Time the serving kernels"
    shell:
        "(loraforge bench kernels --engines {input.engines} {params.spectra} --workers {params.workers}"
        " --out {params.unfinished} && mv {params.unfinished}/*.jsonl {params.folder}) 2>&1 | tee {log}"


rule bench_cpu_ops:
    """Serving operations on the CPU, ours and its engine's, checked and timed side by side."""
    output:
        f"{RESULTS}/cpu_ops.jsonl",
    log:
        f"{RESULTS}/logs/bench_cpu_ops.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        engine=CONFIG.cpu_ops.engine,
        blocks=CONFIG.cpu_ops.blocks,
        source=source_digest("bench/cpu_ops.py", "ops", "jit.py")
        + jit.source_hash("cpu"),
    message:
        "Time the operations on the CPU"
    shell:
        "loraforge bench cpu-ops --engine {params.engine} --blocks {params.blocks} -o {output} 2>&1 | tee {log}"
