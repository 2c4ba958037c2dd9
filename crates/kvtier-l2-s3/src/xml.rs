//! Bodies of answers: a small part of XML, from a server that may send anything. Without a document type, never deeper than
//! [`MAX_DEPTH`], and never longer than the body, which is bounded.

use std::fmt::Write as _;

use quick_xml::Reader;
use quick_xml::escape::{escape, resolve_predefined_entity};
use quick_xml::events::Event;

use super::sign::Credentials;
use super::{name, time};

/// Deepest element of an answer of S3, with a reserve.
const MAX_DEPTH: usize = 8;

/// A body that is not XML, or not of the expected kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Malformed;

/// Code and message of an error.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ErrorBody {
    pub(super) code: String,
    pub(super) message: String,
}

/// One object of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ListEntry {
    pub(super) key: String,
    pub(super) size: u64,
    /// Seconds since the Unix epoch.
    pub(super) modified: u64,
}

/// Page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Listing {
    pub(super) entries: Vec<ListEntry>,
    /// Token of the next page.
    pub(super) next: Option<String>,
}

/// Passes each element to `ended` at its end: its name behind those of the elements around it, with a `/` in between and
/// without namespaces, and the text directly in it.
fn read(bytes: &[u8], mut ended: impl FnMut(&str, String)) -> Result<(), Malformed> {
    let text = std::str::from_utf8(bytes).map_err(|_| Malformed)?;
    let mut reader = Reader::from_str(text);
    reader.config_mut().expand_empty_elements = true;
    let (mut path, mut open) = (String::new(), Vec::<(usize, String)>::new());
    let mut has_ended = false;
    loop {
        match reader.read_event().map_err(|_| Malformed)? {
            Event::Start(tag) => {
                if open.len() == MAX_DEPTH || has_ended {
                    return Err(Malformed);
                }
                open.push((path.len(), String::new()));
                if !path.is_empty() {
                    path.push('/');
                }
                path.push_str(tag.local_name().as_ref());
            }
            Event::End(_) => {
                let (parent, text) = open.pop().ok_or(Malformed)?;
                ended(&path, text);
                path.truncate(parent);
                has_ended = open.is_empty();
            }
            Event::Text(part) => append(&mut open, &part.xml10_content()),
            Event::CData(part) => append(&mut open, &part.xml10_content()),
            Event::GeneralRef(part) => {
                match part.resolve_char_ref().map_err(|_| Malformed)? {
                    Some(character) => append(&mut open, character.encode_utf8(&mut [0; 4])),
                    // No other entities: there is no document type.
                    None => append(
                        &mut open,
                        resolve_predefined_entity(&part).ok_or(Malformed)?,
                    ),
                }
            }
            Event::DocType(_) => return Err(Malformed),
            Event::Eof if has_ended => return Ok(()),
            Event::Eof => return Err(Malformed),
            Event::Empty(_) | Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
        }
    }
}

fn append(open: &mut [(usize, String)], text: &str) {
    if let Some((_, inner)) = open.last_mut() {
        inner.push_str(text);
    }
}

/// Reads an error, `None` if the body is something else.
pub(super) fn error(bytes: &[u8]) -> Option<ErrorBody> {
    let (mut found, mut is_error) = (ErrorBody::default(), false);
    read(bytes, |path, text| match path {
        "Error/Code" => found.code = text,
        "Error/Message" => found.message = text,
        "Error" => is_error = true,
        _ => {}
    })
    .ok()?;
    is_error.then_some(found)
}

/// Reads a page of a listing.
pub(super) fn listing(bytes: &[u8]) -> Result<Listing, Malformed> {
    let (mut listing, mut entry) = (Listing::default(), ListEntry::default());
    let (mut is_quoted, mut is_truncated) = (false, false);
    let (mut is_listing, mut is_valid) = (false, true);
    read(bytes, |path, text| {
        match path.strip_prefix("ListBucketResult").unwrap_or("other") {
            "" => is_listing = true,
            "/EncodingType" => is_quoted = text.eq_ignore_ascii_case("url"),
            "/IsTruncated" => is_truncated = text == "true",
            "/NextContinuationToken" => listing.next = Some(text),
            "/Contents/Key" => entry.key = text,
            "/Contents/Size" => match text.parse() {
                Ok(size) => entry.size = size,
                Err(_) => is_valid = false,
            },
            "/Contents/LastModified" => entry.modified = time::parse(&text).unwrap_or_default(),
            "/Contents" => listing.entries.push(std::mem::take(&mut entry)),
            _ => {}
        }
    })?;
    if is_quoted {
        for entry in &mut listing.entries {
            entry.key = name::unquoted(&entry.key).ok_or(Malformed)?;
        }
    }
    listing.next = listing.next.filter(|next| is_truncated && !next.is_empty());
    if is_listing && is_valid && listing.next.is_some() == is_truncated {
        Ok(listing)
    } else {
        Err(Malformed)
    }
}

/// Reads the id of a new upload in parts. Servers name the element around it differently.
pub(super) fn upload_id(bytes: &[u8]) -> Result<String, Malformed> {
    let (mut id, mut is_error) = (String::new(), false);
    read(bytes, |path, text| match path.split_once('/') {
        Some((_, "UploadId")) => id = text,
        _ => is_error |= path == "Error",
    })?;
    if id.is_empty() || is_error {
        Err(Malformed)
    } else {
        Ok(id)
    }
}

/// Reads the answer to the completion of an upload, which may be an error although its status is not.
pub(super) fn is_complete(bytes: &[u8]) -> Result<bool, Malformed> {
    let mut is_error = false;
    read(bytes, |path, _| is_error |= path == "Error")?;
    Ok(!is_error)
}

/// Reads the credentials of an assumed role.
pub(super) fn assumed_role(bytes: &[u8]) -> Result<Credentials, Malformed> {
    let (mut id, mut secret, mut token, mut end) = (None, None, None, None);
    read(bytes, |path, text| {
        let field = path.strip_prefix(
            "AssumeRoleWithWebIdentityResponse/AssumeRoleWithWebIdentityResult/Credentials/",
        );
        match field {
            Some("AccessKeyId") => id = Some(text),
            Some("SecretAccessKey") => secret = Some(text),
            Some("SessionToken") => token = Some(text),
            Some("Expiration") => end = time::parse(&text),
            _ => {}
        }
    })?;
    Ok(Credentials {
        access_key_id: id.ok_or(Malformed)?,
        secret_access_key: secret.ok_or(Malformed)?,
        session_token: token,
        expires_at: Some(end.ok_or(Malformed)?),
    })
}

/// Reads the result of a delete in quiet mode: the keys that were not deleted, and why.
pub(super) fn not_deleted(bytes: &[u8]) -> Result<Vec<(String, ErrorBody)>, Malformed> {
    let (mut is_result, mut failed) = (false, Vec::new());
    let (mut key, mut body) = (String::new(), ErrorBody::default());
    read(bytes, |path, text| match path {
        "DeleteResult" => is_result = true,
        "DeleteResult/Error/Key" => key = text,
        "DeleteResult/Error/Code" => body.code = text,
        "DeleteResult/Error/Message" => body.message = text,
        "DeleteResult/Error" => {
            failed.push((std::mem::take(&mut key), std::mem::take(&mut body)));
        }
        _ => {}
    })?;
    if is_result {
        Ok(failed)
    } else {
        Err(Malformed)
    }
}

/// Writes the request of a delete of several keys.
pub(super) fn delete<'a>(keys: impl Iterator<Item = &'a str>) -> String {
    let mut out = String::from(
        "<Delete xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Quiet>true</Quiet>",
    );
    for key in keys {
        let _ = write!(out, "<Object><Key>{}</Key></Object>", escape(key));
    }
    out.push_str("</Delete>");
    out
}

/// Whether XML can hold a key unchanged: it has no control characters, and changes ends of lines.
pub(super) fn can_hold(key: &str) -> bool {
    let is_bad = |c: char| c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}');
    !key.contains(is_bad) && key.trim() == key
}

/// Writes the request that puts the parts of an upload together.
pub(super) fn complete(etags: &[String]) -> String {
    let mut out = String::from("<CompleteMultipartUpload>");
    for (number, etag) in (1..).zip(etags) {
        let _ = write!(
            out,
            "<Part><PartNumber>{number}</PartNumber><ETag>{}</ETag></Part>",
            escape(etag.as_str())
        );
    }
    out.push_str("</CompleteMultipartUpload>");
    out
}

/// Text as it stands in XML.
#[cfg(test)]
pub(super) fn escaped(text: &str) -> String {
    escape(text).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvtier_core::random::SplitMix64;

    #[test]
    fn listings_are_read_quoted_or_not() {
        let body = |quoted: &str, key: &str| {
            format!(
                "<?xml version=\"1.0\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{quoted}\
                 <Name>b</Name><IsTruncated>true</IsTruncated><NextContinuationToken>a&amp;b&#x3D;</NextContinuationToken>\
                 <Contents><Key>{key}</Key><Size>12</Size><LastModified>2026-11-22T14:04:06.000Z</LastModified>\
                 <ETag>&quot;x&quot;</ETag></Contents></ListBucketResult>"
            )
        };
        let expected = Listing {
            entries: vec![ListEntry {
                key: "a b&<ü".into(),
                size: 12,
                modified: 1_795_356_246,
            }],
            next: Some("a&b=".into()),
        };
        let encoded = body("<EncodingType>url</EncodingType>", "a+b%26%3C%C3%BC");
        assert_eq!(listing(encoded.as_bytes()), Ok(expected.clone()));
        let plain = body("", "a b&amp;&lt;ü");
        assert_eq!(listing(plain.as_bytes()), Ok(expected));
    }

    #[test]
    fn hostile_bodies_are_malformed() {
        let deep = "<a>".repeat(100_000);
        let listed = "<ListBucketResult>";
        for body in [
            "",
            "x",
            "<",
            "</ListBucketResult>",
            "<ListBucketResult/><ListBucketResult/>",
            "<Other/>",
            "<ListBucketResult>&unknown;</ListBucketResult>",
            "<!DOCTYPE a [<!ENTITY b \"c\">]><ListBucketResult/>",
            "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
            "<ListBucketResult><Contents><Size>-1</Size></Contents></ListBucketResult>",
            "<ListBucketResult><EncodingType>url</EncodingType><Contents><Key>%</Key></Contents></ListBucketResult>",
            "<ListBucketResult>&#0;</a>",
            &deep,
            listed,
        ] {
            assert_eq!(listing(body.as_bytes()), Err(Malformed), "{body:.80}");
        }
        assert_eq!(
            listing(b"<ListBucketResult>\xff</ListBucketResult>"),
            Err(Malformed)
        );
        assert_eq!(
            upload_id(b"<InitiateMultipartUploadResult/>"),
            Err(Malformed)
        );
        assert_eq!(error(b"<html></html>"), None);
        assert_eq!(listing(b"<ListBucketResult/>"), Ok(Listing::default()));
    }

    #[test]
    fn damaged_bodies_never_panic() {
        let bodies: [&[u8]; 4] = [
            b"<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\"><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>\
              <NextContinuationToken>a&amp;&#x3D;</NextContinuationToken><Contents><Key>a%20b</Key><Size>1</Size>\
              <LastModified>2026-11-22T14:04:06.000Z</LastModified></Contents></ListBucketResult>",
            b"<DeleteResult><Error><Key><![CDATA[a]]></Key><Code>b</Code></Error><!-- c --></DeleteResult>",
            b"<InitiateMultipartUploadResult><UploadId>a</UploadId></InitiateMultipartUploadResult>",
            b"<Error><Code>SlowDown</Code><Message>&lt;</Message></Error>",
        ];
        let mut draws = 0;
        let mut draw = |bound: usize| {
            draws += 1;
            SplitMix64::nth(7, draws) as usize % bound
        };
        for _ in 0..20_000 {
            let mut body = bodies[draw(bodies.len())].to_vec();
            for _ in 0..=draw(4) {
                let at = draw(body.len());
                match draw(4) {
                    0 => body[at] = draw(256) as u8,
                    1 => body.truncate(at + 1),
                    2 => body.insert(at, b"<>&;/\"%!?["[draw(10)]),
                    _ => drop(body.remove(at)),
                }
                if body.is_empty() {
                    break;
                }
            }
            let _ = (listing(&body), not_deleted(&body), upload_id(&body));
            let _ = (error(&body), is_complete(&body), assumed_role(&body));
        }
    }

    #[test]
    fn requests_and_results_of_deletes_and_uploads() {
        let request = delete(["a&b", "c"].into_iter());
        assert!(request.contains("<Key>a&amp;b</Key></Object><Object><Key>c</Key>"));
        let body = b"<DeleteResult><Error><Key>a&amp;b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>";
        let failed = not_deleted(body).unwrap();
        assert_eq!(failed[0].0, "a&b");
        assert_eq!(
            (&*failed[0].1.code, &*failed[0].1.message),
            ("AccessDenied", "no")
        );
        assert_eq!(not_deleted(b"<DeleteResult xmlns=\"x\"/>"), Ok(vec![]));
        assert!(complete(&["\"e\"".into()]).contains("<ETag>&quot;e&quot;</ETag>"));
        assert_eq!(
            is_complete(b"<Error><Code>SlowDown</Code></Error>"),
            Ok(false)
        );
        assert!(can_hold("模型/a b") && !can_hold("a\nb") && !can_hold("a "));
    }
}
