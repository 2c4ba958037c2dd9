//! A tier whose answers the test writes.

use std::collections::HashMap;
use std::io::{IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use kvtier_common::sync::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::super::frame::{self, HEADER, Head};

/// What the tier does after a request.
pub(super) enum Then {
    /// Answers a request.
    Answer(u64, Value),
    /// Sends bytes.
    Send(Vec<u8>),
    Close,
}

/// A request.
pub(super) struct Asked<'a> {
    /// Number of the connection, from 0.
    pub(super) connection: usize,
    pub(super) id: u64,
    pub(super) body: Value,
    pub(super) segment: &'a OwnedFd,
}

impl Asked<'_> {
    pub(super) fn op(&self) -> &str {
        self.body["op"].as_str().unwrap()
    }
}

/// Objects in memory, and answers that are right.
#[derive(Default)]
pub(super) struct Good {
    pub(super) objects: HashMap<String, (Vec<u8>, String)>,
}

pub(super) fn text(value: &Value) -> String {
    value.as_str().unwrap().to_owned()
}

pub(super) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

impl Good {
    pub(super) fn answer(&mut self, asked: &Asked<'_>) -> Value {
        let body = &asked.body;
        let items = |name: &str| body[name].as_array().unwrap().clone();
        match asked.op() {
            "hello" => json!({"version": 1, "tier": "fake", "max_in_flight": 4, "capabilities":
                {"delete": true, "metadata": true}}),
            "store" => {
                let store = |item: &Value| {
                    let mut bytes = vec![0; number(&item["len"]) as usize];
                    rustix::io::pread(asked.segment, &mut bytes, number(&item["at"])).unwrap();
                    let object = (bytes, text(&item["meta"]));
                    let old = self.objects.insert(text(&item["key"]), object.clone());
                    json!({"new": old != Some(object)})
                };
                json!({"results": items("objects").iter().map(store).collect::<Vec<_>>()})
            }
            "load" => {
                let load = |item: &Value| match self.objects.get(item["key"].as_str().unwrap()) {
                    None => json!({"error": "not_found"}),
                    Some((bytes, meta)) => {
                        if bytes.len() as u64 == number(&item["len"]) {
                            rustix::io::pwrite(asked.segment, bytes, number(&item["at"])).unwrap();
                        }
                        json!({"len": bytes.len(), "meta": meta})
                    }
                };
                json!({"results": items("objects").iter().map(load).collect::<Vec<_>>()})
            }
            "lookup" => {
                let find = |key: &Value| {
                    let found = self.objects.get(key.as_str().unwrap());
                    found.map(|(bytes, meta)| json!({"len": bytes.len(), "meta": meta}))
                };
                json!({"results": items("keys").iter().map(find).collect::<Vec<_>>()})
            }
            "delete" => {
                let delete = |key: &Value| self.objects.remove(key.as_str().unwrap()).is_some();
                json!({"results": items("keys").iter().map(delete).collect::<Vec<_>>()})
            }
            _ => json!({}),
        }
    }

    /// The right answer, to be sent.
    pub(super) fn then(&mut self, asked: &Asked<'_>) -> Vec<Then> {
        vec![Then::Answer(asked.id, self.answer(asked))]
    }
}

type Script = Box<dyn FnMut(&mut Good, Asked<'_>) -> Vec<Then> + Send>;

/// The tier; it serves connections in threads of their own.
pub(super) struct Fake {
    pub(super) path: PathBuf,
    script: Arc<Mutex<(Good, Script)>>,
    _place: TempDir,
}

impl Fake {
    pub(super) fn new(
        script: impl FnMut(&mut Good, Asked<'_>) -> Vec<Then> + Send + 'static,
    ) -> Self {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let script: Arc<Mutex<(Good, Script)>> =
            Arc::new(Mutex::new((Good::default(), Box::new(script))));
        let shared = Arc::clone(&script);
        std::thread::spawn(move || {
            for (connection, stream) in listener.incoming().enumerate() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || serve(connection, &stream.unwrap(), &shared));
            }
        });
        Self {
            path,
            script,
            _place: place,
        }
    }

    /// Replaces the script.
    pub(super) fn does(
        &self,
        script: impl FnMut(&mut Good, Asked<'_>) -> Vec<Then> + Send + 'static,
    ) {
        self.script.lock().1 = Box::new(script);
    }
}

/// Serves until either side closes.
fn serve(connection: usize, mut stream: &UnixStream, script: &Mutex<(Good, Script)>) -> Option<()> {
    let mut head = [0; HEADER];
    let segment = receive(stream, &mut head)?;
    loop {
        let Head { len, id } = Head::decode(&head).unwrap();
        let mut body = vec![0; len];
        stream.read_exact(&mut body).ok()?;
        let asked = Asked {
            connection,
            id,
            body: serde_json::from_slice(&body).unwrap(),
            segment: &segment,
        };
        let thens = {
            let (good, script) = &mut *script.lock();
            script(good, asked)
        };
        for then in thens {
            let bytes = match then {
                Then::Answer(id, body) => frame::encode(id, body.to_string().as_bytes()),
                Then::Send(bytes) => bytes,
                Then::Close => {
                    stream.shutdown(std::net::Shutdown::Both).ok()?;
                    return None;
                }
            };
            stream.write_all(&bytes).ok()?;
        }
        stream.read_exact(&mut head).ok()?;
    }
}

/// Receives the first header and the segment.
fn receive(stream: &UnixStream, head: &mut [u8; HEADER]) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut slices = [IoSliceMut::new(head)];
    let got = recvmsg(stream, &mut slices, &mut control, RecvFlags::empty()).ok()?;
    assert!(got.bytes == 0 || got.bytes == HEADER);
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    })
}
