//! A key, as it stands in most requests.

#![no_main]

use kvtier_proto::key::{CacheKey, KeyForm, SkipTokens, VecTokens, check_salt};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    let key = CacheKey::decode(payload, &mut VecTokens);
    let counted = CacheKey::decode(payload, &mut SkipTokens);
    assert_eq!(key.is_ok(), counted.is_ok());
    let (Ok(mut key), Ok(counted)) = (key, counted) else {
        return;
    };
    assert_eq!(key.tokens.len(), counted.tokens);
    assert!(key.tokens.len() <= payload.len());
    let _ = check_salt(key.cache_salt);
    for tp_size in [i64::MIN, -1, 0, 1, 8, i64::MAX] {
        let _ = key.readers(tp_size);
    }
    let mut written = Vec::new();
    key.write(KeyForm::Full, &mut written);
    // The full form has no way to leave the count out.
    key.num_kv_readers.get_or_insert(0);
    let again = CacheKey::decode(&written, &mut VecTokens).expect("our own bytes");
    assert_eq!(again, key);
});
