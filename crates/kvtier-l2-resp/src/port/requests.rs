//! Requests of RESP2, without I/O: arrays of strings. Bytes of clients are hostile: counts and lengths are bounded, and what is
//! too long is passed over.

use super::super::MAX_VALUE;
use super::super::reply::{self, Head, Malformed};

/// Arguments of a request, its name included.
const MAX_ARGUMENTS: u64 = 1025;

/// Bytes of an argument that is kept. Keys are shorter.
const MAX_ARGUMENT: u64 = 4 << 10;

/// Bytes of all arguments of a request.
pub(super) const MAX_KEPT: usize = 256 << 10;

/// Longest first line of a request or an argument.
const MAX_HEAD: usize = 32;

/// The arguments of a request, its name first; those that were too long are empty.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PortRequest {
    pub(super) arguments: Vec<Vec<u8>>,
    /// Whether one was too long.
    pub(super) is_cut: bool,
    kept: usize,
}

/// What has arrived.
#[derive(Default)]
pub(super) struct Requests {
    bytes: Vec<u8>,
    /// Bytes that were read.
    at: usize,
    request: PortRequest,
    /// Arguments that are to come.
    left: u64,
    /// Bytes to be passed over.
    skipped: u64,
}

impl Requests {
    pub(super) fn receive(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.at));
        self.bytes.extend_from_slice(bytes);
    }

    /// The first request; none if it is incomplete.
    pub(super) fn next(&mut self) -> Result<Option<PortRequest>, Malformed> {
        loop {
            let skipped = self.skipped.min((self.bytes.len() - self.at) as u64);
            self.at += skipped as usize;
            self.skipped -= skipped;
            if self.skipped > 0 {
                return Ok(None);
            }
            if self.left == 0 && !self.request.arguments.is_empty() {
                return Ok(Some(std::mem::take(&mut self.request)));
            }
            let rest = &self.bytes[self.at..];
            let Some((head, used)) = reply::head(&rest[..rest.len().min(MAX_HEAD)])? else {
                return match rest.len() {
                    ..MAX_HEAD => Ok(None),
                    _ => Err(Malformed("a line without an end")),
                };
            };
            match (head, self.left) {
                (Head::Array(Some(count @ ..=MAX_ARGUMENTS)), 0) => {
                    (self.left, self.at) = (count, self.at + used);
                }
                (Head::Bulk(Some(length @ ..=MAX_VALUE)), 1..) => {
                    if !self.argument(used, length)? {
                        return Ok(None);
                    }
                    self.left -= 1;
                }
                _ => return Err(Malformed("no array of strings")),
            }
        }
    }

    /// Takes an argument of this length behind its first line, or passes it over. Returns whether it was there.
    fn argument(&mut self, head: usize, length: u64) -> Result<bool, Malformed> {
        let body = self.at + head;
        let end = body + length as usize;
        let request = &mut self.request;
        if length > MAX_ARGUMENT || request.kept + length as usize > MAX_KEPT {
            request.is_cut = true;
            request.arguments.push(Vec::new());
            (self.at, self.skipped) = (body, length + 2);
            return Ok(true);
        }
        match self.bytes.get(end..end + 2) {
            None => return Ok(false),
            Some(b"\r\n") => {}
            Some(_) => return Err(Malformed("a string of another length")),
        }
        request.kept += length as usize;
        request.arguments.push(self.bytes[body..end].to_vec());
        self.at = end + 2;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8], piece: usize) -> Result<Vec<Vec<Vec<u8>>>, Malformed> {
        let (mut requests, mut all) = (Requests::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            requests.receive(piece);
            while let Some(request) = requests.next()? {
                assert!(request.is_cut == request.arguments.contains(&Vec::new()));
                all.push(request.arguments);
            }
        }
        assert!(requests.bytes.len() <= 2 * MAX_ARGUMENT as usize);
        Ok(all)
    }

    #[test]
    fn requests_are_the_same_in_pieces_and_long_strings_are_passed_over() {
        let long = "x".repeat(MAX_ARGUMENT as usize + 1);
        let bytes = format!(
            "*1\r\n$4\r\nPING\r\n*0\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{long}\r\n*2\r\n$3\r\nGET\r\n$2\r\n\r\n\r\n",
            long.len()
        );
        let words = |words: &[&str]| -> Vec<Vec<u8>> {
            words.iter().map(|word| word.as_bytes().to_vec()).collect()
        };
        let expected = vec![
            words(&["PING"]),
            words(&["SET", "k", ""]),
            words(&["GET", "\r\n"]),
        ];
        for piece in [1, 7, 64, 1 << 20] {
            assert_eq!(read(bytes.as_bytes(), piece).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for bytes in [
            "PING\r\n",
            "*x\r\n",
            "*-1\r\n",
            "*1026\r\n",
            "*99999999999999999999\r\n",
            "$4\r\nPING\r\n",
            "*1\r\n:4\r\n",
            "*1\r\n*1\r\n",
            "*1\r\n$-1\r\n",
            "*1\r\n$536870913\r\n",
            "*1\r\n$4\r\nPINGPONG\r\n",
            "*00000000000000000000000000000000001\r\n",
        ] {
            assert!(read(bytes.as_bytes(), 1 << 20).is_err(), "{bytes:?}");
        }
        // Not even one byte of what was announced has come.
        assert_eq!(
            read(b"*1025\r\n$536870912\r\n", 3).unwrap(),
            Vec::<Vec<Vec<u8>>>::new()
        );
    }

    #[test]
    fn arguments_together_are_bounded() {
        let argument = format!(
            "${MAX_ARGUMENT}\r\n{}\r\n",
            "x".repeat(MAX_ARGUMENT as usize)
        );
        let bytes = format!("*1025\r\n{}", argument.repeat(1025));
        let mut requests = Requests::default();
        requests.receive(bytes.as_bytes());
        let request = requests.next().unwrap().unwrap();
        let kept: usize = request.arguments.iter().map(Vec::len).sum();
        assert!(request.is_cut && kept <= MAX_KEPT && request.arguments.len() == 1025);
    }
}
