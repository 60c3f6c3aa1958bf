ARMS = [
    (policy, file_name(budget))
    for policy in CONFIG.quality.policies
    for budget in CONFIG.quality.budgets
]


rule evaluate_quality:
    """Native scores by lm-eval of base, original and compressed adapters; finished arms are never scored twice, lost factors rebuilt."""
    input:
        f"{RESULTS}/fleet.verified",
        f"{RESULTS}/factors.jsonl",
        [f"{RESULTS}/allocation/{policy}_{budget}.json" for policy, budget in ARMS],
        base=f"{BASE}/model.safetensors",
        config=ancient(f"{RESULTS}/config.json"),
    output:
        f"{RESULTS}/quality.jsonl",
    log:
        f"{RESULTS}/logs/evaluate_quality.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    resources:
        gpu=int(ON_GPU),
    params:
        lock=LOCK,
        method=CONFIG.factor.method,
        base=subpath(input.base, parent=True),
        results=subpath(input.config, parent=True),
        settings=section("fleet", "quality"),
        source=source_digest(
            "quality/arms.py", "quality/harness.py", "quality/metrics.py"
        ),
    message:
        "Score adapters with lm-eval"
    shell:
        "(loraforge factor {params.lock} --method {params.method}"
        " && loraforge eval run --config {input.config} --base {params.base}"
        " --allocations {params.results}/allocation -o {output}) 2>&1 | tee {log}"
