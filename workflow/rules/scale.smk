rule bench_scale:
    """Time and memory of planning fleets of 10, 100, 1,000 adapters, and of changing them; one machine, a step at a time."""
    output:
        f"{RESULTS}/scale.jsonl",
    log:
        f"{RESULTS}/logs/bench_scale.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        adapters=comma(map(str, CONFIG.scale.adapters or [])),
        rank=CONFIG.scale.rank,
        source=source_digest("bench/scale.py", "factor", "allocate", "fleet"),
    message:
        "Plan fleets of {params.adapters} adapters"
    shell:
        "loraforge bench scale --adapters {params.adapters} --rank {params.rank} --workers {threads}"
        " -o {output} 2>&1 | tee {log}"
