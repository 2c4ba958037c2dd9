//! Listings: pages of up to a thousand objects.

use super::client::Call;
use super::{S3Bucket, name, xml};
use kvtier_l2::{BoxFuture, ErrorKind, L2Error, ListPage, Listed, Recovered, recover_pages};

/// Objects per page at most.
const MAX_PAGE: usize = 1000;

/// Longest page: keys of 1024 bytes, quoted.
const MAX_BODY: usize = 8 << 20;

/// Longest position of a listing.
const MAX_TOKEN: usize = 8 << 10;

/// A page of a listing, and the number of other objects in it.
pub(super) async fn page(
    bucket: &S3Bucket,
    from: Option<&str>,
    limit: usize,
) -> Result<(ListPage, u64), L2Error> {
    let mut query = vec![
        ("encoding-type", "url".to_owned()),
        ("list-type", "2".to_owned()),
        ("max-keys", limit.clamp(1, MAX_PAGE).to_string()),
    ];
    if !bucket.key_prefix.is_empty() {
        let prefix = format!("{}@", bucket.key_prefix);
        query.push(("prefix", name::quoted_in_query(&prefix)));
    }
    if let Some(from) = from {
        if from.is_empty() || from.len() > MAX_TOKEN {
            let what = "not a position of a listing; give one that it returned";
            return Err(bucket.client.error(ErrorKind::Refused, what));
        }
        query.push(("continuation-token", name::quoted_in_query(from)));
    }
    query.sort_unstable();
    // A long listing is not waited for at the end.
    let _open = bucket.opened().await?;
    let call = Call {
        query,
        ..Call::of_bucket("GET")
    };
    let answer = bucket.client.send(&call).await?;
    if answer.response.status() != 200 {
        return Err(answer.failure("listing").await);
    }
    let body = answer.whole(MAX_BODY).await?;
    let listing = xml::listing(&body).map_err(|_| bucket.malformed("listing"))?;
    if listing.next.as_deref() == from && from.is_some() {
        let what = "listing: the server repeats a page";
        return Err(bucket.client.error(ErrorKind::Unavailable, what));
    }
    let (mut objects, mut foreign) = (Vec::new(), 0);
    for entry in listing.entries {
        match name::parse(&bucket.key_prefix, &entry.key) {
            Some(key) if entry.size > 0 => objects.push(Listed {
                key,
                bytes: entry.size,
                used_at: entry.modified,
            }),
            _ => foreign += 1,
        }
    }
    let page = ListPage {
        objects,
        next: listing.next,
    };
    Ok((page, foreign))
}

/// Passes all objects to `found`, until that returns false.
pub(super) async fn recover(
    bucket: &S3Bucket,
    found: &(dyn Fn(Vec<Listed>) -> bool + Send + Sync),
) -> Result<Recovered, L2Error> {
    let next_page = |from: Option<String>| -> BoxFuture<'_, _> {
        Box::pin(async move { page(bucket, from.as_deref(), MAX_PAGE).await })
    };
    recover_pages(next_page, found, || bucket.malformed("listing")).await
}
