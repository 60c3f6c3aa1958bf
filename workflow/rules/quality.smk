ARMS = [
    (policy, file_name(budget))
    for policy in CONFIG.quality.policies
    for budget in CONFIG.quality.budgets
]


rule evaluate_quality:
    """Native scores by lm-eval of base, original and compressed adapters; no finished arm is scored twice."""
    input:
        f"{RESULTS}/fleet.verified",
        f"{RESULTS}/factors.jsonl",
        ranks=[
            f"{RESULTS}/allocation/{policy}_{budget}.json" for policy, budget in ARMS
        ],
        base=f"{BASE}/model.safetensors",
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
        base=subpath(input.base, parent=True),
        cache=CONFIG.factor.cache,
        allocations=lambda wildcards, input: Path(input.ranks[0]).parent,
        config=section("name", "fleet", "factor", "quality"),
        source=source_digest(
            "quality/arms.py", "quality/harness.py", "quality/metrics.py"
        ),
    message:
        "Score adapters with lm-eval"
    shell:
        "loraforge eval run --config <(printf %s {params.config:q}) --base {params.base} --cache {params.cache}"
        " --allocations {params.allocations} -o {output} 2>&1 | tee {log}"
