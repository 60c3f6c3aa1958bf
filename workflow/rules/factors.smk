rule cache_factors:
    """Ordered factors and spectra of every module, in the content-addressed cache; only what is missing is built."""
    input:
        f"{RESULTS}/fleet.verified",
    output:
        f"{RESULTS}/factors.jsonl",
    log:
        f"{RESULTS}/logs/cache_factors.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        lock=LOCK,
        method=CONFIG.factor.method,
        source=source_digest("factor", "fleet/peft_io.py", "fleet/peft_config.py"),
    message:
        "Factorise the fleet"
    shell:
        "loraforge factor {params.lock} --method {params.method}"
        " --records {output} 2>&1 | tee {log}"


rule bench_recompression:
    """Seconds that every method takes to factorise the fleet, all methods in one process, passes interleaved."""
    input:
        f"{RESULTS}/fleet.verified",
    output:
        f"{RESULTS}/recompression.jsonl",
    log:
        f"{RESULTS}/logs/bench_recompression.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        lock=LOCK,
        adapters=comma(CONFIG.recompression.adapters),
        methods=comma(CONFIG.recompression.methods),
        warmups=CONFIG.recompression.warmups,
        passes=CONFIG.recompression.passes,
        source=source_digest("factor"),
    message:
        "Time every factorisation method"
    shell:
        "loraforge bench recompression {params.lock} --adapters {params.adapters} --methods {params.methods}"
        " --warmups {params.warmups} --passes {params.passes} -o {output} 2>&1 | tee {log}"
