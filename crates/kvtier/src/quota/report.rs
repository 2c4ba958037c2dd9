//! Quotas as text. Missing fields are left out, so single tenants of LMCache's own server can be shown too.

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanBytes, HumanCount};
use serde_json::Value;

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_HORIZONTAL_ONLY)
        .set_header(header.iter().copied());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn bytes(value: &Value) -> String {
    value
        .as_u64()
        .map_or("-".into(), |bytes| HumanBytes(bytes).to_string())
}

fn limit(value: &Value) -> String {
    match value {
        Value::Null => "unlimited".into(),
        value => bytes(value),
    }
}

/// A size in GiB, as in LMCache's fields.
fn size(gib: &Value) -> String {
    match gib.as_f64() {
        Some(gib) => HumanBytes((gib * 1_073_741_824.0) as u64).to_string(),
        None => gib.as_str().unwrap_or("-").to_owned(),
    }
}

fn count(value: &Value) -> String {
    HumanCount(value.as_u64().unwrap_or(0)).to_string()
}

fn rate(value: &Value) -> String {
    value
        .as_f64()
        .map_or("-".into(), |rate| format!("{:.1} %", 100.0 * rate))
}

fn yes(value: &Value) -> &'static str {
    match value.as_bool() {
        Some(true) => "yes",
        _ => "no",
    }
}

/// Result of a change.
pub(super) fn change(answer: &Value) -> String {
    let salt = answer["cache_salt"].as_str().unwrap_or_default();
    match answer["status"].as_str() {
        Some("ok") => format!("{salt}: at most {}", size(&answer["limit_gb"])),
        Some("removed") => format!("{salt}: quota removed"),
        Some("not_found") => format!("{salt}: there was no quota"),
        _ => answer.to_string(),
    }
}

/// Result of an import.
pub(super) fn import(answer: &Value) -> String {
    format!("{} quotas set", count(&answer["set"]))
}

/// One tenant, tier by tier.
pub(super) fn tenant(answer: &Value) -> String {
    let salt = answer["cache_salt"].as_str().unwrap_or_default();
    let quota = match answer["exists"].as_bool() {
        Some(true) => format!(
            "at most {} in each tier, or as below",
            size(&answer["limit_gb"])
        ),
        _ => "no quota of its own; the default applies".into(),
    };
    let mut out = format!("{salt}: {quota}");
    let Some(tiers) = answer["tiers"].as_object() else {
        return out;
    };
    out.push_str(&format!("\nhit rate: {}\n", rate(&answer["hit_rate"])));
    let mut table = table(&[
        "tier",
        "enforced",
        "in use",
        "limit",
        "reserved",
        "over quota",
        "objects",
        "refused",
        "evicted",
    ]);
    for (tier, here) in tiers {
        table.add_row([
            tier.clone(),
            yes(&here["enforced"]).into(),
            bytes(&here["usage_bytes"]),
            limit(&here["limit_bytes"]),
            bytes(&here["reserved_bytes"]),
            yes(&here["over_quota"]).into(),
            count(&here["objects"]),
            count(&here["refused_over_quota"]),
            count(&here["evicted_objects"]),
        ]);
    }
    out.push_str(&table.to_string());
    out
}

/// All tenants, one line per tenant: usage / limit of each tier.
pub(super) fn list(answer: &Value) -> String {
    let users = answer["users"].as_object();
    let users = users.filter(|users| !users.is_empty());
    let Some(users) = users else {
        return "no tenant has a quota".into();
    };
    let tiers = users.values().find_map(|user| user["tiers"].as_object());
    let tiers: Vec<_> = tiers.into_iter().flat_map(|tiers| tiers.keys()).collect();
    let mut header = vec!["tenant", "quota"];
    header.extend(tiers.iter().map(|tier| tier.as_str()));
    header.extend(["over quota", "refused", "evicted", "hit rate"]);
    let mut table = table(&header);
    for (salt, user) in users {
        let of_tiers = || tiers.iter().map(|tier| &user["tiers"][tier.as_str()]);
        let sum = |key: &str| of_tiers().map(|here| here[key].as_u64().unwrap_or(0)).sum();
        let sum = |key: &str| HumanCount(sum(key)).to_string();
        let quota = match user["exists"].as_bool() {
            Some(false) => "-".into(),
            _ => size(&user["limit_gb"]),
        };
        let mut row = vec![salt.clone(), quota];
        row.extend(of_tiers().map(|here| {
            let (used, limit) = (bytes(&here["usage_bytes"]), limit(&here["limit_bytes"]));
            match here["enforced"].as_bool() {
                Some(false) => used,
                _ => format!("{used} / {limit}"),
            }
        }));
        let over = of_tiers().any(|here| here["over_quota"] == true);
        row.push(yes(&over.into()).into());
        row.push(sum("refused_over_quota"));
        row.push(sum("evicted_objects"));
        row.push(rate(&user["hit_rate"]));
        table.add_row(row);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tenants_have_one_line_each() {
        let here = |used: u64, limit: Value| {
            json!({ "enforced": true, "usage_bytes": used, "limit_bytes": limit, "reserved_bytes": 0,
                "over_quota": used > 1 << 30, "objects": 3, "refused_over_quota": 2, "evicted_objects": 1 })
        };
        let answer = json!({ "users": {
            "a\n\u{1b}[2J": { "exists": true, "limit_gb": 1.0, "hit_rate": 0.25,
                "tiers": { "l1": here(1 << 31, json!(1 << 30)), "fs-0": here(0, Value::Null) } },
        } });
        let text = list(&crate::out::shown(&answer));
        for part in [
            "a\\n\\u001b[2J",
            "2.00 GiB / 1.00 GiB",
            "0 B / unlimited",
            "yes",
            "4",
            "25.0 %",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'));
        assert_eq!(list(&json!({ "users": {} })), "no tenant has a quota");
    }

    #[test]
    fn tenant_of_lmcache_has_no_tiers() {
        let answer =
            json!({ "cache_salt": "a", "limit_gb": 0.5, "current_usage_gb": 0.0, "exists": true });
        assert_eq!(
            tenant(&answer),
            "a: at most 512.00 MiB in each tier, or as below"
        );
        assert_eq!(
            change(&json!({ "cache_salt": "a", "status": "not_found" })),
            "a: there was no quota"
        );
    }
}
