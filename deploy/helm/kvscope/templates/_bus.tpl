{{- /* Where NATS is: `urls` of the values, or the service of the dependency. */}}
{{- define "kvscope.busUrls" -}}
{{- if .Values.bus.urls -}}
{{ dict "urls" .Values.bus.urls | toJson }}
{{- else if .Values.nats.enabled -}}
{{- if ne .Values.bus.tenant "default" }}
{{- fail "bus.tenant: the servers of this release let roles use the tenant default alone (nats.config.merge.authorization). Leave it out, or name servers of yours in bus.urls" }}
{{- end -}}
{{ dict "urls" (list (printf "tls://%s:4222" (include "nats.fullname" .Subcharts.nats))) | toJson }}
{{- else -}}
{{ fail "bus.enabled needs servers: name bus.urls, or set nats.enabled=true for the dependency" }}
{{- end -}}
{{- end }}

{{- /* The Secret that cert-manager fills for a role: dict "root" . "role" "agent", "hub" or "setup". */}}
{{- define "kvscope.clientCertificate" -}}
{{ include "kvscope.fullname" .root }}-nats-{{ .role }}
{{- end }}

{{- /*
Who a role is for NATS, as JSON: its credentials, its certificate, and the authority of the servers. NATS knows a sender
by these alone, so no role has those of another.
*/}}
{{- define "kvscope.busIdentity" -}}
{{- $values := .root.Values -}}
{{- $credentials := $values.bus.credentials -}}
{{- $tls := $values.bus.tls -}}
{{- if eq .role "hub" -}}
{{- $credentials = $values.hub.credentials -}}
{{- $tls = $values.hub.tls -}}
{{- else if eq .role "setup" -}}
{{- $credentials = $values.bus.setup.credentials -}}
{{- $tls = $values.bus.setup.tls -}}
{{- end -}}
{{- if $values.bus.certManager.enabled -}}
{{- $tls = dict "secret" (include "kvscope.clientCertificate" .) "ca" "ca.crt" "cert" "tls.crt" "key" "tls.key" -}}
{{- else if not $tls.secret -}}
{{- $tls = dict "secret" $values.bus.tls.secret "ca" $values.bus.tls.ca "cert" "" "key" "" -}}
{{- end -}}
{{- $prefix := get (dict "agent" "bus" "hub" "hub" "setup" "bus.setup") .role -}}
{{- if not (or $credentials.secret $tls.cert) }}
{{- fail (printf "bus.enabled needs an identity for each role: name %s.credentials.secret or %s.tls.secret with cert and key, or set bus.certManager.enabled=true" $prefix $prefix) }}
{{- end -}}
{{- if and (ne .role "agent") $credentials.secret (eq (printf "%s/%s" $credentials.secret $credentials.key) (printf "%s/%s" $values.bus.credentials.secret $values.bus.credentials.key)) }}
{{- fail (printf "%s.credentials are those of the agents: NATS would let each agent do what this role may. `monitor bus permissions` prints what each needs" $prefix) }}
{{- end -}}
{{ dict "credentials" $credentials "tls" $tls | toJson }}
{{- end }}

{{- /* The keys of the configuration file that begin with nats. dict "root" . "role" "agent" or "hub" */}}
{{- define "kvscope.busConfig" -}}
{{- $identity := include "kvscope.busIdentity" . | fromJson -}}
{{- $tls := $identity.tls -}}
nats = {{ (include "kvscope.busUrls" .root | fromJson).urls | toJson }}
nats_tenant = {{ .root.Values.bus.tenant | quote }}
{{- if $identity.credentials.secret }}
nats_creds = "/etc/kvscope/credentials/{{ $identity.credentials.key }}"
{{- end }}
{{- if $tls.secret }}
{{- if $tls.ca }}
nats_ca = "/etc/kvscope/tls/{{ $tls.ca }}"
{{- end }}
{{- if $tls.cert }}
nats_cert = "/etc/kvscope/tls/{{ $tls.cert }}"
nats_key = "/etc/kvscope/tls/{{ $tls.key }}"
{{- end }}
{{- end }}
{{- end }}

{{- define "kvscope.busMounts" -}}
{{- if .root.Values.bus.enabled -}}
{{- $identity := include "kvscope.busIdentity" . | fromJson -}}
{{- if $identity.credentials.secret }}
- {name: nats-credentials, mountPath: /etc/kvscope/credentials, readOnly: true}
{{- end }}
{{- if $identity.tls.secret }}
- {name: nats-tls, mountPath: /etc/kvscope/tls, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- /* Of a Secret, the keys of this role alone. */}}
{{- define "kvscope.busVolumes" -}}
{{- if .root.Values.bus.enabled -}}
{{- $identity := include "kvscope.busIdentity" . | fromJson -}}
{{- with $identity.credentials }}
{{- if .secret }}
- name: nats-credentials
  secret:
    secretName: {{ .secret | quote }}
    defaultMode: 0440
    items: [{key: {{ .key | quote }}, path: {{ .key | quote }}}]
{{- end }}
{{- end }}
{{- with $identity.tls }}
{{- if .secret }}
- name: nats-tls
  secret:
    secretName: {{ .secret | quote }}
    defaultMode: 0440
    items:
      {{- range compact (list .ca .cert .key) }}
      - {key: {{ . | quote }}, path: {{ . | quote }}}
      {{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
