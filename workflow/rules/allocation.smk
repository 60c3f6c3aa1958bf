ALLOCATIONS = [
    (policy, file_name(budget))
    for policy in CONFIG.policies
    for budget in CONFIG.budgets
]


rule allocate_ranks:
    """Retained ranks of the whole fleet under one policy and budget."""
    input:
        f"{RESULTS}/factors.jsonl",
        FLEET_FILES,
        lock=LOCK,
    output:
        ranks=f"{RESULTS}/allocation/{{policy}}_{{budget}}.json",
        records=f"{RESULTS}/allocation/{{policy}}_{{budget}}.jsonl",
    log:
        f"{RESULTS}/logs/allocate_ranks_{{policy}}_{{budget}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        method=CONFIG.factor.method,
        cache=CONFIG.factor.cache,
        budget=lambda wildcards: wildcards.budget.replace("-", "/"),
        source=source_digest("allocate"),
    message:
        "Allocate ranks: {wildcards.policy} at {wildcards.budget}"
    shell:
        "loraforge allocate {input.lock} --policy {wildcards.policy} --budget {params.budget}"
        " --method {params.method} --cache {params.cache} -o {output.ranks} --records {output.records}"
        " 2>&1 | tee {log}"
