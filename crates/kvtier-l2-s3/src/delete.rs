//! Deletes: up to a thousand objects per request. S3 does not answer whether an object was there, so that is asked before.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hyper::body::Bytes;
use kvtier_core::object_key::ObjectKey;
use md5::{Digest as _, Md5};

use super::client::Call;
use super::content::Content;
use super::limit::S3Class;
use super::{MAX_ANSWER, Open, S3Bucket, xml};
use kvtier_l2::{ErrorKind, L2Error};

/// Most objects of one request.
const MAX_KEYS: usize = 1000;

/// Longest answer: all keys with an error each.
const MAX_RESULT: usize = 4 << 20;

/// Deletes objects; returns whether each was there. A key twice was there once.
pub(super) async fn delete_all(
    bucket: &Arc<S3Bucket>,
    keys: Vec<ObjectKey>,
) -> Vec<Result<bool, L2Error>> {
    let mut seen = HashSet::new();
    let keys: Vec<_> = keys
        .iter()
        .map(|key| {
            bucket
                .key_of(key)
                .map(|key| (seen.insert(key.clone()), key))
        })
        .collect();
    let first: Vec<_> = keys
        .iter()
        .filter_map(|key| Some(key.as_ref().ok()?.clone()))
        .filter(|(is_first, _)| *is_first)
        .map(|(_, key)| key)
        .collect();
    let there = bucket.each(first.clone(), is_there).await;
    let mut results: HashMap<String, Result<bool, L2Error>> =
        first.iter().cloned().zip(there).collect();
    let present: Vec<_> = first
        .into_iter()
        .filter(|key| matches!(results.get(key), Some(Ok(true))))
        .collect();
    let (together, singly): (Vec<_>, Vec<_>) = present
        .into_iter()
        .partition(|key| xml::can_hold(key) && !bucket.deletes_singly.load(Ordering::Relaxed));
    let parts: Vec<_> = together.chunks(MAX_KEYS).map(<[String]>::to_vec).collect();
    let deleted = bucket.each(parts.clone(), delete_together).await;
    let mut singly = singly;
    for (keys, result) in parts.into_iter().zip(deleted) {
        match result {
            Ok(Some(failed)) => {
                for (key, error) in failed {
                    results.insert(key, Err(error));
                }
            }
            // This server cannot.
            Ok(None) => singly.extend(keys),
            Err(error) => {
                results.extend(keys.into_iter().map(|key| (key, Err(error.clone()))));
            }
        }
    }
    let deleted = bucket.each(singly.clone(), delete_one).await;
    for (key, result) in singly.into_iter().zip(deleted) {
        if let Err(error) = result {
            results.insert(key, Err(error));
        }
    }
    keys.into_iter()
        .map(|key| match key? {
            (true, key) => results.remove(&key).unwrap_or(Ok(false)),
            (false, _) => Ok(false),
        })
        .collect()
}

async fn is_there(bucket: Arc<S3Bucket>, key: String, _: Open) -> Result<bool, L2Error> {
    let answer = bucket.client.send(&Call::new("HEAD", &key)).await?;
    let is_there = match answer.response.status() {
        200 => true,
        404 => false,
        _ => return Err(answer.failure("lookup before a delete").await),
    };
    answer.response.end();
    Ok(is_there)
}

/// Deletes objects by one request; returns those that were not deleted, `None` if the server has no such request.
async fn delete_together(
    bucket: Arc<S3Bucket>,
    keys: Vec<String>,
    _: Open,
) -> Result<Option<Vec<(String, L2Error)>>, L2Error> {
    let body = xml::delete(keys.iter().map(String::as_str));
    let sum = base64(&Md5::digest(&body));
    let call = Call {
        query: vec![("delete", String::new())],
        headers: vec![
            ("content-md5", sum),
            ("content-type", "application/xml".to_owned()),
        ],
        content: Content::Bytes(Bytes::from(body)),
        class: S3Class::Objects,
        ..Call::of_bucket("POST")
    };
    let answer = bucket.client.send(&call).await?;
    match answer.response.status() {
        200 => {}
        status @ (400 | 405 | 501) => {
            let error = answer.failure("delete").await;
            tracing::debug!(%error, "deleting one object per request");
            // 400 may be of this request alone.
            bucket
                .deletes_singly
                .fetch_or(status != 400, Ordering::Relaxed);
            return Ok(None);
        }
        _ => return Err(answer.failure("delete").await),
    }
    let body = answer.whole(MAX_RESULT).await?;
    let failed = xml::not_deleted(&body).map_err(|_| bucket.malformed("delete"))?;
    let failed = failed.into_iter().map(|(key, body)| {
        let what: String = format!("delete: {}: {}", body.code, body.message);
        let what: String = what.chars().filter(|c| !c.is_control()).take(200).collect();
        let kind = match &*body.code {
            "InternalError" | "SlowDown" => ErrorKind::Unavailable,
            _ => ErrorKind::Refused,
        };
        (key, bucket.client.error(kind, &what))
    });
    Ok(Some(failed.collect()))
}

async fn delete_one(bucket: Arc<S3Bucket>, key: String, _: Open) -> Result<(), L2Error> {
    let answer = bucket.client.send(&Call::new("DELETE", &key)).await?;
    match answer.response.status() {
        200..300 | 404 => answer.whole(MAX_ANSWER).await.map(drop),
        _ => Err(answer.failure("delete").await),
    }
}

/// Base 64 with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for part in bytes.chunks(3) {
        let at = |index: usize| u32::from(part.get(index).copied().unwrap_or(0));
        let bits = at(0) << 16 | at(1) << 8 | at(2);
        for digit in 0..4 {
            if digit > part.len() {
                out.push('=');
            } else {
                out.push(char::from(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize]));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn base64_of_rfc_4648() {
        for (text, expected) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(super::base64(text.as_bytes()), expected);
        }
    }
}
