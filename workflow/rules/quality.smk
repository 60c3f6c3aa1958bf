# what scores depend on: the same files as the names of finished records
SCORING = source_digest(*quality.SCORING)

ARMS = [
    (policy, file_name(budget))
    for policy in CONFIG.quality.policies
    for budget in CONFIG.quality.budgets
]

BUSY = CONFIG.quality.jobs if ON_GPU else workflow.cores
CANDIDATES = list(dict.fromkeys(STUDY.candidates))
# any candidate may come to be reported, so that ranks of all are there before one is chosen
REPORTED = list(dict.fromkeys([*STUDY.baselines, *CANDIDATES]))
SHARED = [
    f"{RESULTS}/cts/{variant}_{file_name(budget)}/cts.json"
    for variant in STUDY.shared
    for budget in STUDY.budgets
]
REFINED = [
    f"{RESULTS}/refined/{policy}_{file_name(STUDY.decide_at)}/manifest.json"
    for policy in dict.fromkeys(STUDY.refined)
]


rule evaluate_quality:
    """Native scores by lm-eval of base, original and compressed adapters; no finished arm is scored twice."""
    input:
        f"{RESULTS}/fleet.verified",
        f"{RESULTS}/factors.jsonl",
        ranks=[
            f"{RESULTS}/allocation/{policy}_{budget}.json" for policy, budget in ARMS
        ],
        moments=moments_of(CONFIG.quality.policies),
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
        moments=lambda wildcards, input: option("--moments", input.moments),
        config=section("name", "fleet", "factor", "quality"),
        source=SCORING,
    message:
        "Score adapters with lm-eval"
    shell:
        "loraforge eval run --config <(printf %s {params.config:q}) --base {params.base} --cache {params.cache}"
        " --allocations {params.allocations} {params.moments} -o {output} 2>&1 | tee {log}"


rule fit_shared:
    """Bases that the adapters of a fleet share (Compress-then-Serve), as equivalent independent adapters."""
    input:
        f"{RESULTS}/fleet.verified",
    output:
        f"{RESULTS}/cts/{{variant}}_{{budget}}/cts.json",
    log:
        f"{RESULTS}/logs/fit_shared_{{variant}}_{{budget}}.log",
    wildcard_constraints:
        variant="full|weighted|diagonal",
    conda:
        "../../envs/core.yaml"
    threads: 1
    params:
        lock=LOCK,
        folder=subpath(output[0], parent=True),
        budget=lambda wildcards: wildcards.budget.replace("-", "/"),
        iterations=STUDY.iterations,
        steps=STUDY.steps,
        source=source_digest("cts"),
    message:
        "Fit shared bases: {wildcards.variant} at {wildcards.budget}"
    shell:
        "OMP_NUM_THREADS={threads} loraforge cts {params.lock} --budget {params.budget} --variant {wildcards.variant}"
        " --iterations {params.iterations} --steps {params.steps} -o {params.folder} --force 2>&1 | tee {log}"


rule build_tasks:
    """What adapters were trained on, from the packages that hold it: fleets are refined on its prompts."""
    output:
        expand(
            f"{BUILT_TASKS}/{{task}}/train.jsonl", task=dict.fromkeys(TASKS.values())
        ),
    log:
        f"{RESULTS}/logs/build_tasks.log",
    conda:
        "../../envs/core.yaml"
    params:
        tasks=list(dict.fromkeys(TASKS.values())),
        folder=lambda wildcards, output: Path(output[0]).parents[1],
        source=source_digest("quality/builders"),
    message:
        "Build the training splits of the tasks"
    shell:
        "loraforge tasks build {params.tasks} --out {params.folder} 2>&1 | tee {log}"


rule refine_fleet:
    """A compressed fleet whose adapters have learned their originals' own answers to unlabelled prompts."""
    input:
        manifest=f"{RESULTS}/fleet/{{policy}}_{{budget}}/manifest.json",
        base=f"{BASE}/model.safetensors",
        prompts=f"{RESULTS}/prompts/train",
    output:
        f"{RESULTS}/refined/{{policy}}_{{budget}}/manifest.json",
    log:
        f"{RESULTS}/logs/refine_fleet_{{policy}}_{{budget}}.log",
    conda:
        "../../envs/core.yaml"
    threads: JOBS if ON_GPU else workflow.cores
    resources:
        gpu=int(ON_GPU),
    params:
        lock=LOCK,
        compressed=subpath(input.manifest, parent=True),
        base=subpath(input.base, parent=True),
        folder=subpath(output[0], parent=True),
        learn=STUDY.refine,
        device=DEVICE,
        jobs=JOBS,
        source=source_digest("activation", *refine.SOURCE),
    message:
        "Refine the fleet: {wildcards.policy} at {wildcards.budget}"
    shell:
        "loraforge refine {params.compressed} --adapters {params.lock} --base {params.base} --prompts {input.prompts}"
        " --limit {params.learn.prompts} --steps {params.learn.steps} --batch-size {params.learn.batch_size}"
        " --lr {params.learn.lr} --device {params.device} --jobs {params.jobs} -o {params.folder} --force 2>&1 | tee {log}"


rule score_validation:
    """Scores of the candidates on the validation splits, to choose by and for nothing else."""
    input:
        f"{RESULTS}/fleet.verified",
        f"{RESULTS}/factors.jsonl",
        ranks=ranks_of(CANDIDATES),
        moments=moments_of(CANDIDATES),
        base=f"{BASE}/model.safetensors",
    output:
        f"{RESULTS}/study/validation.jsonl",
    log:
        f"{RESULTS}/logs/score_validation.log",
    priority: 1  # while a GPU scores, other cores fit shared bases
    conda:
        "../../envs/core.yaml"
    threads: BUSY
    resources:
        gpu=int(ON_GPU),
    params:
        base=subpath(input.base, parent=True),
        cache=CONFIG.factor.cache,
        allocations=lambda wildcards, input: Path(input.ranks[0]).parent,
        moments=lambda wildcards, input: option("--moments", input.moments),
        config=scoring("validation", CANDIDATES),
        source=SCORING,
    message:
        "Score the candidates on the validation splits"
    shell:
        "loraforge eval run --config <(printf %s {params.config:q}) --base {params.base} --cache {params.cache}"
        " --allocations {params.allocations} {params.moments} -o {output} 2>&1 | tee {log}"


rule select_policies:
    """The finalists, by their validation scores alone; written down with a hash before any test score exists."""
    input:
        f"{RESULTS}/study/validation.jsonl",
    output:
        f"{RESULTS}/study/selected.json",
    log:
        f"{RESULTS}/logs/select_policies.log",
    conda:
        "../../envs/core.yaml"
    params:
        lock=LOCK,
        candidates=",".join(CANDIDATES),
        at=STUDY.decide_at,
        finalists=STUDY.finalists,
        source=source_digest("quality/selection.py", "quality/scores.py"),
    message:
        "Choose policies"
    shell:
        "loraforge eval select {input} --candidates {params.candidates} --at {params.at} --finalists {params.finalists}"
        " --fleet {params.lock} -o {output} 2>&1 | tee {log}"


rule score_test:
    """Scores of the finalists and of all baselines on the test splits: reported, and never chosen by."""
    input:
        f"{RESULTS}/fleet.verified",
        f"{RESULTS}/factors.jsonl",
        selected=f"{RESULTS}/study/selected.json",
        ranks=ranks_of(REPORTED),
        expanded=[*SHARED, *REFINED],
        moments=moments_of(REPORTED),
        base=f"{BASE}/model.safetensors",
    output:
        f"{RESULTS}/study/test.jsonl",
    log:
        f"{RESULTS}/logs/score_test.log",
    priority: 1  # while a GPU scores, other cores fit shared bases
    conda:
        "../../envs/core.yaml"
    threads: BUSY
    resources:
        gpu=int(ON_GPU),
    params:
        base=subpath(input.base, parent=True),
        cache=CONFIG.factor.cache,
        allocations=lambda wildcards, input: Path(input.ranks[0]).parent,
        moments=lambda wildcards, input: option("--moments", input.moments),
        expanded=lambda wildcards, input: option(
            "--expanded", [Path(file).parent for file in input.expanded]
        ),
        config=scoring("test", list(STUDY.baselines)),
        source=SCORING,
    message:
        "Score finalists and baselines on the test splits"
    shell:
        "loraforge eval run --config <(printf %s {params.config:q}) --base {params.base} --selected {input.selected}"
        " --cache {params.cache} --allocations {params.allocations} {params.moments} {params.expanded}"
        " -o {output} 2>&1 | tee {log}"
