FACTOR_SOURCE = source_digest(
    "factor", "fleet/peft_io.py", "fleet/peft_config.py", "fleet/parts.py"
)


rule factorise_part:
    """Factors of a part of the fleet's adapters, in the cache that all jobs share: on a cluster, a node a part."""
    input:
        f"{RESULTS}/fleet.verified",
        lambda wildcards: part_files(int(wildcards.part), int(wildcards.parts)),
        lock=LOCK,
    output:
        touch(f"{RESULTS}/factors/{{part}}-{{parts}}.done"),
    log:
        f"{RESULTS}/logs/factorise_part_{{part}}-{{parts}}.log",
    wildcard_constraints:
        part=r"\d+",
        parts=r"\d+",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        method=CONFIG.factor.method,
        cache=CONFIG.factor.cache,
        source=FACTOR_SOURCE,
    message:
        "Factorise part {wildcards.part} of {wildcards.parts} of the fleet"
    shell:
        "loraforge factor {input.lock} --method {params.method} --cache {params.cache}"
        " --part {wildcards.part}/{wildcards.parts} 2>&1 | tee {log}"


rule cache_factors:
    """Ordered factors and spectra of every module, in the content-addressed cache; only what is missing is built."""
    input:
        f"{RESULTS}/fleet.verified",
        factor_parts(),
        FLEET_FILES,
        lock=LOCK,
    output:
        f"{RESULTS}/factors.jsonl",
    log:
        f"{RESULTS}/logs/cache_factors.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        method=CONFIG.factor.method,
        cache=CONFIG.factor.cache,
        source=FACTOR_SOURCE,
    message:
        "Factorise the fleet"
    shell:
        "loraforge factor {input.lock} --method {params.method} --cache {params.cache}"
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
