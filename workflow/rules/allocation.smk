PROMPTS = f"{RESULTS}/prompts/validation"
DEVICE = CONFIG.quality.device.replace("auto", "cuda") if ON_GPU else "cpu"
JOBS = CONFIG.quality.jobs if ON_GPU else 1  # processes that share a GPU
TASKS = {adapter.name: adapter.task for adapter in FLEET.adapters if adapter.task}

ALLOCATIONS = [
    (policy, file_name(budget))
    for policy in CONFIG.policies
    for budget in CONFIG.budgets
]


rule collect_activations:
    """What the base model's modules are fed by unlabelled prompts, once for the fleet."""
    input:
        base=f"{BASE}/model.safetensors",
        prompts=[
            f"config/tasks/{task}/validation.jsonl"
            for task in dict.fromkeys(TASKS.values())
        ],
    output:
        MOMENTS["activations"],
    log:
        f"{RESULTS}/logs/collect_activations.log",
    priority: 1
    conda:
        "../../envs/core.yaml"
    threads: 1 if ON_GPU else workflow.cores
    resources:
        gpu=int(ON_GPU),
    params:
        base=subpath(input.base, parent=True),
        limit=CONFIG.study.calibration,
        device=DEVICE,
        source=source_digest("activation"),
    message:
        "Collect what the base model's modules are fed"
    shell:
        "loraforge moments {params.base} {input.prompts} --limit {params.limit} --device {params.device}"
        " -o {output} 2>&1 | tee {log}"


rule gather_prompts:
    """The prompts of a split of every adapter, by its name; nobody reads the answers beside them."""
    input:
        lambda wildcards: [prompts_of(task, wildcards.split) for task in TASKS.values()],
    output:
        directory(f"{RESULTS}/prompts/{{split}}"),
    log:
        f"{RESULTS}/logs/gather_prompts_{{split}}.log",
    wildcard_constraints:
        split="train|validation",
    conda:
        "../../envs/core.yaml"
    params:
        names=list(TASKS),
    message:
        "Gather the {wildcards.split} prompts of every adapter"
    shell:
        "(mkdir -p {output}; names=({params.names}); files=({input});"
        ' for i in "${{!names[@]}}"; do cp "${{files[i]}}" "{output}/${{names[i]}}.jsonl"; done) 2>&1 | tee {log}'


rule collect_fisher:
    """How much each adapter's own answers hang on its updates; what is collected of one is kept in the cache."""
    input:
        base=f"{BASE}/model.safetensors",
        verified=f"{RESULTS}/fleet.verified",
        prompts=PROMPTS,
    output:
        MOMENTS["fisher"],
    log:
        f"{RESULTS}/logs/collect_fisher.log",
    priority: 1
    conda:
        "../../envs/core.yaml"
    threads: JOBS if ON_GPU else workflow.cores
    resources:
        gpu=int(ON_GPU),
    params:
        lock=LOCK,
        cache=CONFIG.factor.cache,
        base=subpath(input.base, parent=True),
        limit=CONFIG.study.answers,
        device=DEVICE,
        jobs=JOBS,
        source=source_digest("activation", "quality/arms.py", "quality/decoding.py"),
    message:
        "Collect what the adapters' answers hang on"
    shell:
        "loraforge moments {params.base} --adapters {params.lock} --prompts {input.prompts} --limit {params.limit}"
        " --device {params.device} --jobs {params.jobs} --cache {params.cache} -o {output} 2>&1 | tee {log}"


rule order_directions:
    """Directions of the whole fleet ordered in another norm, once for all its policies; they are kept in the cache."""
    input:
        f"{RESULTS}/factors.jsonl",
        moments=lambda wildcards: MOMENTS[wildcards.norm],
    output:
        f"{RESULTS}/moments/{{norm}}.json",
    log:
        f"{RESULTS}/logs/order_directions_{{norm}}.log",
    wildcard_constraints:
        norm="|".join(MOMENTS),
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        lock=LOCK,
        cache=CONFIG.factor.cache,
        policy=lambda wildcards: next(
            name for name, rule in RULES.items() if rule.norm == wildcards.norm
        ),
        source=source_digest("activation", "factor/evd.py"),
    message:
        "Order directions by {wildcards.norm}"
    shell:
        "loraforge allocate {params.lock} --policy {params.policy} --budget 1 --moments {input.moments}"
        " --cache {params.cache} -o {output} 2>&1 | tee {log}"


rule allocate_ranks:
    """Retained ranks of the whole fleet under one policy and budget."""
    input:
        f"{RESULTS}/factors.jsonl",
        FLEET_FILES,
        lambda wildcards: [
            f"{RESULTS}/moments/{norm}.json" for norm in norms_of([wildcards.policy])
        ],
        lock=LOCK,
        moments=lambda wildcards: moments_of([wildcards.policy]),
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
        moments=lambda wildcards, input: option("--moments", input.moments),
        budget=lambda wildcards: wildcards.budget.replace("-", "/"),
        source=source_digest("allocate"),
    message:
        "Allocate ranks: {wildcards.policy} at {wildcards.budget}"
    shell:
        "loraforge allocate {input.lock} --policy {wildcards.policy} --budget {params.budget} {params.moments}"
        " --method {params.method} --cache {params.cache} -o {output.ranks} --records {output.records}"
        " 2>&1 | tee {log}"
