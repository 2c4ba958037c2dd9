//! `--tenant-prefix`: operators name tenants without the prefix of their salts, and keys have it.

use kvtier_client::Scope;

use super::bed::{files, read, server, store};
use crate::http::{json_of, request};
use crate::l2::settle;
use crate::support::prompt;

// proves: docs/tenants.md#names-behind-a-prefix
#[test]
fn equal_names_with_and_without_the_prefix_are_two_tenants() {
    let tier = tempfile::tempdir().unwrap();
    let flags = [
        "--eviction-policy",
        "IsolatedLRU",
        "--tenant-prefix",
        "dynamo-cache-salt:",
    ];
    let (server, prompt) = (server(tier.path(), &flags), prompt(1, 2));
    let mut worker = server.engine_driven(1, &Scope::new("named"));
    let salts = ["dynamo-cache-salt:acme", "acme"];
    for (salt, seed) in salts.into_iter().zip(1..) {
        store(&mut worker, salt, &prompt, seed);
    }
    settle(&server);
    let limit = r#"{"limit_gb": 1}"#;
    assert_eq!(request(&server, "PUT", "/quota/acme", limit).0, 200);
    let (status, _, refused) = request(&server, "PUT", "/quota/dynamo-cache-salt:acme", limit);
    assert!(
        status == 400 && refused.contains("dynamo-cache-salt:acme has the --tenant-prefix"),
        "{refused}"
    );
    for ((salt, name), seed) in salts.into_iter().zip(["acme", "@acme"]).zip(1..) {
        assert_eq!(read(&mut worker, salt, &prompt, seed, "r"), 2);
        let tenant = json_of(&server, "GET", &format!("/quota/{name}"), "").1;
        assert_eq!(tenant["cache_salt"], name);
        assert_eq!(tenant["exists"], salt == salts[0]);
        let look = server.engine().quotas().look();
        assert_eq!(look.table().get(salt).is_some(), salt == salts[0]);
        assert_eq!(
            tenant["tiers"]["l1"]["usage_bytes"],
            look.tenant(salt)[0].bytes
        );
        let metrics = request(&server, "GET", "/metrics", "").2;
        for series in [
            format!("lmcache_mp_lookup_hit_tokens_total{{cache_salt=\"{name}\""),
            format!(
                "kvtier_tenant_bytes{{cache_salt=\"{name}\",tier=\"l1\"}} {}",
                tenant["tiers"]["l1"]["usage_bytes"]
            ),
            format!(
                "lmcache_mp_l2_store_completed_objects_chunks_total{{cache_salt=\"{name}\"}} 2"
            ),
        ] {
            assert!(metrics.contains(&series), "{series}");
        }
        assert!(!metrics.contains("dynamo-cache-salt"), "{metrics}");
        // Identity is the salt's.
        let own = |path: &std::path::PathBuf| path.to_string_lossy().contains(&format!("@{salt}."));
        assert_eq!(
            files(tier.path()).iter().filter(|path| own(path)).count(),
            2
        );
    }
    let tenants = json_of(&server, "GET", "/tenants?sort=name", "").1;
    let names: Vec<_> = tenants["tenants"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tenant| tenant["cache_salt"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["@acme", "acme"]);
}
