//! Quotas as text. Missing fields are left out, so single tenants of LMCache's own server can be shown too.

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanBytes, HumanCount};
use kvtier_observe::api::{Limit, QuotaChange, Tenant, TenantInTier, TenantPage, TierUsage};

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

fn bytes(bytes: u64) -> String {
    HumanBytes(bytes).to_string()
}

/// A size in GiB, as in LMCache's fields.
fn size(limit: Limit) -> String {
    match limit {
        Limit::Gib(gib) => bytes((gib * 1_073_741_824.0) as u64),
        Limit::Unlimited(_) => "unlimited".into(),
    }
}

fn count(count: u64) -> String {
    HumanCount(count).to_string()
}

fn rate(tenant: &Tenant) -> String {
    let rate = tenant
        .activity
        .as_ref()
        .and_then(|lookups| lookups.hit_rate);
    rate.map_or("-".into(), |rate| format!("{:.1} %", 100.0 * rate))
}

fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.into()
}

/// Result of a quota that was set with this reserved share.
pub(super) fn set(change: &QuotaChange, reserved: u64) -> String {
    match reserved {
        0 => self::change(change),
        share => format!("{}, {} reserved", self::change(change), bytes(share)),
    }
}

/// Result of a change.
pub(super) fn change(change: &QuotaChange) -> String {
    let salt = change.cache_salt.as_deref().unwrap_or_default();
    match (change.status.as_str(), change.limit_gb) {
        ("ok", limit) => format!("{salt}: at most {}", limit.map_or("-".into(), size)),
        ("removed", _) => format!("{salt}: quota removed"),
        ("not_found", _) => format!("{salt}: there was no quota"),
        (status, _) => format!("{salt}: {status}"),
    }
}

/// Result of an import.
pub(super) fn import(change: &QuotaChange) -> String {
    format!("{} quotas set", count(change.set.unwrap_or(0) as u64))
}

fn usage(tier: &TenantInTier) -> TierUsage {
    tier.usage.clone().unwrap_or_default()
}

/// One tenant, tier by tier.
pub(super) fn tenant(tenant: &Tenant) -> String {
    let salt = tenant.cache_salt.as_deref().unwrap_or_default();
    let quota = match tenant.exists {
        Some(true) => format!(
            "at most {} in each tier, or as below",
            size(tenant.limit_gb)
        ),
        _ => "no quota of its own; the default applies".into(),
    };
    let mut out = format!("{salt}: {quota}");
    if tenant.tiers.is_empty() {
        return out;
    }
    out.push_str(&format!("\nhit rate: {}\n", rate(tenant)));
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
    for (tier, here) in &tenant.tiers {
        let here = usage(here);
        table.add_row([
            tier.clone(),
            yes(here.enforced),
            bytes(here.usage_bytes),
            here.limit_bytes.map_or("unlimited".into(), bytes),
            bytes(here.reserved_bytes),
            yes(here.over_quota),
            count(here.objects),
            count(here.refused_over_quota),
            count(here.evicted_objects),
        ]);
    }
    out.push_str(&table.to_string());
    out
}

/// All tenants, one line per tenant: usage / limit of each tier, and the reserved share.
pub(super) fn list(page: &TenantPage) -> String {
    let Some(first) = page.users.values().next() else {
        return "no tenant has a quota".into();
    };
    let tiers: Vec<_> = first.tiers.keys().collect();
    let mut header = vec!["tenant", "quota"];
    header.extend(tiers.iter().map(|tier| tier.as_str()));
    header.extend(["over quota", "refused", "evicted", "hit rate"]);
    let mut table = table(&header);
    for (salt, user) in &page.users {
        let of_tiers = tiers.iter().map(|tier| user.tiers.get(*tier));
        let of_tiers: Vec<_> = of_tiers
            .map(|here| here.map_or_else(TierUsage::default, usage))
            .collect();
        let sum = |value: fn(&TierUsage) -> u64| count(of_tiers.iter().map(value).sum());
        let quota = match user.exists {
            Some(false) => "-".into(),
            _ => size(user.limit_gb),
        };
        let mut row = vec![salt.clone(), quota];
        row.extend(of_tiers.iter().map(|here| {
            let used = bytes(here.usage_bytes);
            let limit = here.limit_bytes.map_or("unlimited".into(), bytes);
            match (here.enforced, here.reserved_bytes) {
                (false, _) => used,
                (true, 0) => format!("{used} / {limit}"),
                (true, share) => format!("{used} / {limit}, {} reserved", bytes(share)),
            }
        }));
        row.push(yes(of_tiers.iter().any(|here| here.over_quota)));
        row.push(sum(|here| here.refused_over_quota));
        row.push(sum(|here| here.evicted_objects));
        row.push(rate(user));
        table.add_row(row);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    fn typed<T: DeserializeOwned>(answer: Value) -> T {
        serde_json::from_value(answer).unwrap()
    }

    #[test]
    fn tenants_have_one_line_each() {
        let here = |used: u64, limit: Value| {
            json!({ "enforced": true, "usage_bytes": used, "limit_bytes": limit, "reserved_bytes": used >> 4,
                "over_quota": used > 1 << 30, "objects": 3, "refused_over_quota": 2, "evicted_objects": 1 })
        };
        let answer = json!({ "users": {
            "a\n\u{1b}[2J": { "exists": true, "limit_gb": 1.0, "hit_rate": 0.25,
                "tiers": { "l1": here(1 << 31, json!(1 << 30)), "fs-0": here(0, Value::Null) } },
        } });
        let text = list(&typed(crate::out::shown(&answer)));
        for part in [
            "a\\n\\u001b[2J",
            "2.00 GiB / 1.00 GiB, 128.00 MiB reserved",
            "0 B / unlimited",
            "yes",
            "4",
            "25.0 %",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains('\u{1b}'));
        assert_eq!(
            list(&typed(json!({ "users": {} }))),
            "no tenant has a quota"
        );
    }

    #[test]
    fn tenant_of_lmcache_has_no_tiers() {
        let answer =
            json!({ "cache_salt": "a", "limit_gb": 0.5, "current_usage_gb": 0.0, "exists": true });
        assert_eq!(
            tenant(&typed(answer)),
            "a: at most 512.00 MiB in each tier, or as below"
        );
        assert_eq!(
            change(&typed(json!({ "cache_salt": "a", "status": "not_found" }))),
            "a: there was no quota"
        );
    }
}
